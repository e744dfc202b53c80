/* The CUDA driver's entry points that PyTorch, Triton and cuDNN's run-time compiler use. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "vgpu.h"

/* NVIDIA's math libraries each carry a CUDA runtime of their own, linked in. On this driver it would start and
 * then fail, so it is told that there is no device; cuDNN then works in its deviceless mode. */
static bool from_math_library(const void *caller) {
    static const char *const names[] = {"libcudnn", "libcublas", "libcusolver", "libcusparse", "libcufft", "libcurand"};
    Dl_info info;
    if (!dladdr(caller, &info) || info.dli_fname == NULL) return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strstr(info.dli_fname, names[i]) != NULL) return true;
    return false;
}

API int cuInit(UNUSED unsigned flags) {
    if (from_math_library(__builtin_return_address(0)) || device_count() == 0) return NO_DEVICE;
    return SUCCESS;
}

API int cuDriverGetVersion(int *version) {
    *version = VGPU_CUDA_VERSION;
    return SUCCESS;
}

void *own_symbol(const char *name) {
    static void *self;
    Dl_info here, there;
    if (self == NULL) {
        if (!dladdr((void *)(uintptr_t)own_symbol, &here)) return NULL;
        self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    void *found = self ? dlsym(self, name) : NULL;
    if (found == NULL || !dladdr((void *)(uintptr_t)own_symbol, &here) || !dladdr(found, &there)) return NULL;
    return here.dli_fbase == there.dli_fbase ? found : NULL; /* dlsym also looks into the C library */
}

/* Drivers answer a plain name with its newest version. */
static void *entry_point(const char *name) {
    char newer[128];
    if (strncmp(name, "cu", 2) != 0) return NULL;
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *found = strstr(name, "_v") ? NULL : own_symbol(newer);
    return found ? found : own_symbol(name);
}

API int cuGetProcAddress_v2(const char *name, void **out, UNUSED int version, UNUSED uint64_t flags, int *result) {
    *out = entry_point(name);
    if (result != NULL) *result = *out ? 0 : 1;
    return *out ? SUCCESS : NOT_FOUND;
}

API int cuGetProcAddress(const char *name, void **out, UNUSED int version, UNUSED uint64_t flags) {
    *out = entry_point(name);
    return *out ? SUCCESS : NOT_FOUND;
}

API int cudaGetDriverEntryPointByVersion(const char *name, void **out, UNUSED unsigned version,
                                         UNUSED unsigned long long flags, int *result) {
    *out = entry_point(name);
    if (result != NULL) *result = *out ? 0 : 1;
    return SUCCESS;
}

#if VGPU_CUDA_MAJOR < 13
API int cudaGetDriverEntryPoint(const char *name, void **out, UNUSED unsigned long long flags, int *result) {
    return cudaGetDriverEntryPointByVersion(name, out, 0, flags, result);
}
#endif

/* The driver's private tables, which NVIDIA's compilers ask for: there are none. */
API int cuGetExportTable(const void **table, UNUSED const void *id) {
    *table = NULL;
    return NOT_FOUND;
}

API int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API int cuDeviceGetCount(int *count) {
    *count = device_count();
    return SUCCESS;
}

API int cuDeviceGetName(char *name, int length, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "%s", card()->shown);
    return SUCCESS;
}

API int cuDeviceGetUuid_v2(unsigned char uuid[16], int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    device_uuid(device_number(device), uuid);
    return SUCCESS;
}

API int cuDeviceGetUuid(unsigned char uuid[16], int device) { return cuDeviceGetUuid_v2(uuid, device); }

API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *bytes = card()->total;
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    return device_attribute(attribute, device, value);
}

/* A context is a device's number plus one: it has nothing else to remember. */
static void *context_of(int device) { return (void *)((uintptr_t)device + 1); }

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    *context = context_of(device);
    return SUCCESS;
}

API int cuDevicePrimaryCtxGetState(UNUSED int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return SUCCESS;
}

API int cuCtxGetCurrent(void **context) {
    *context = context_of(current_device());
    return SUCCESS;
}

API int cuCtxSetCurrent(void *context) {
    return context ? set_current_device((int)(uintptr_t)context - 1) : SUCCESS;
}

API int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }

API int cuCtxPopCurrent_v2(void **context) {
    if (context != NULL) *context = context_of(current_device());
    return SUCCESS;
}

API int cuCtxGetDevice(int *device) {
    *device = current_device();
    return SUCCESS;
}

/* Modules, libraries and kernels: whatever is loaded is accepted, and every name is found in it. */
static int give_token(void **out) {
    *out = token();
    return SUCCESS;
}

API int cuModuleLoad(void **module, UNUSED const char *path) { return give_token(module); }

API int cuModuleLoadData(void **module, UNUSED const void *image) { return give_token(module); }

API int cuModuleLoadDataEx(void **module, UNUSED const void *image, UNUSED unsigned count, UNUSED int *options,
                           UNUSED void **values) {
    return give_token(module);
}

API int cuModuleGetFunction(void **function, UNUSED void *module, UNUSED const char *name) {
    return give_token(function);
}

API int cuLibraryLoadData(void **library, UNUSED const void *code, UNUSED int *jit_options, UNUSED void **jit_values,
                          UNUSED unsigned jit_count, UNUSED int *options, UNUSED void **values,
                          UNUSED unsigned count) {
    return give_token(library);
}

API int cuLibraryGetKernel(void **kernel, UNUSED void *library, UNUSED const char *name) { return give_token(kernel); }

API int cuLibraryGetModule(void **module, UNUSED void *library) { return give_token(module); }

API int cuKernelGetFunction(void **function, UNUSED void *kernel) { return give_token(function); }

API int cudaLibraryLoadData(void **library, UNUSED const void *code, UNUSED int *jit_options, UNUSED void **jit_values,
                            UNUSED unsigned jit_count, UNUSED int *options, UNUSED void **values,
                            UNUSED unsigned count) {
    return give_token(library);
}

API int cudaLibraryGetKernel(void **kernel, UNUSED void *library, UNUSED const char *name) {
    return give_token(kernel);
}

API int cuLinkCreate_v2(UNUSED unsigned count, UNUSED int *options, UNUSED void **values, void **state) {
    return give_token(state);
}

/* A linker's result is an image that callers may copy; the size is any that holds a header. */
API int cuLinkComplete(UNUSED void *state, void **image, size_t *bytes) {
    static char empty[4096];
    *image = empty;
    if (bytes != NULL) *bytes = sizeof empty;
    return SUCCESS;
}

API int cuMemAlloc_v2(void **out, size_t bytes) { return memory_allocate(current_device(), bytes, out); }

API int cuMemFree_v2(void *address) { return memory_free(address); }

API int cuMemAllocAsync(void **out, size_t bytes, UNUSED void *stream) { return cuMemAlloc_v2(out, bytes); }

API int cuMemFreeAsync(void *address, UNUSED void *stream) { return memory_free(address); }

API int cuMemHostAlloc(void **out, size_t bytes, UNUSED unsigned flags) { return host_allocate(bytes, out); }

API int cuMemAllocHost_v2(void **out, size_t bytes) { return host_allocate(bytes, out); }

API int cuMemFreeHost(void *address) { return host_free(address); }

API int cuMemHostGetDevicePointer_v2(void **out, void *address, UNUSED unsigned flags) {
    *out = address;
    return host_is_pinned(address) ? SUCCESS : INVALID_VALUE;
}

API int cuMemGetAddressRange_v2(void **base, size_t *bytes, const void *address) {
    void *start;
    size_t length;
    if (!memory_range(address, &start, &length)) return INVALID_VALUE;
    if (base != NULL) *base = start;
    if (bytes != NULL) *bytes = length;
    return SUCCESS;
}
