/* Devices as the CUDA runtime and driver describe them: counts, the current one, attributes, properties. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "properties.h"
#include "vgpu.h"

static __thread int chosen;     /* the calling thread's device */
static __thread int last_error; /* kept until somebody asks, as the runtime does */

/* The machine's devices that this process sees, in its own order. */
static int visible[MAX_DEVICES], visible_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void device_uuid_text(int number, char *out, size_t size) {
    unsigned char b[16];
    device_uuid(number, b);
    snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

/* The machine's device that one entry of CUDA_VISIBLE_DEVICES names, by its number or the front of its UUID; -1 for
 * none, or for several. */
static int named_device(const char *entry, size_t length) {
    char own[48], *end;
    int found = -1;
    while (length > 0 && *entry == ' ') entry++, length--;
    while (length > 0 && entry[length - 1] == ' ') length--;
    if (length == 0) return -1;
    if (entry[0] >= '0' && entry[0] <= '9') {
        unsigned long number = strtoul(entry, &end, 10);
        return end == entry + length && number < (unsigned long)card()->devices ? (int)number : -1;
    }
    if (length <= strlen("GPU-")) return -1;
    for (int number = 0; number < card()->devices; number++) {
        device_uuid_text(number, own, sizeof own);
        if (length < sizeof own && strncmp(own, entry, length) == 0) found = found == -1 ? number : -2;
    }
    return found < 0 ? -1 : found;
}

/* As CUDA reads it: an entry that names no device ends the list, and one that is named twice leaves none. */
static void read_visible(void) {
    const char *entry = getenv("CUDA_VISIBLE_DEVICES");
    if (entry == NULL) {
        for (; visible_count < card()->devices; visible_count++) visible[visible_count] = visible_count;
        return;
    }
    for (bool more = true; more && visible_count < MAX_DEVICES;) {
        size_t length = strcspn(entry, ",");
        int number = named_device(entry, length);
        if (number < 0) return;
        for (int i = 0; i < visible_count; i++) {
            if (visible[i] != number) continue;
            visible_count = 0;
            return;
        }
        visible[visible_count++] = number;
        more = entry[length] == ',';
        entry += length + 1;
    }
}

int device_count(void) {
    pthread_once(&once, read_visible);
    return visible_count;
}

int device_number(int device) { return device >= 0 && device < device_count() ? visible[device] : -1; }

int device_with_number(int number) {
    for (int device = 0; device < device_count(); device++)
        if (visible[device] == number) return device;
    return -1;
}

int current_device(void) { return chosen; }

int set_current_device(int device) {
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    chosen = device;
    return SUCCESS;
}

int fail(int status) {
    last_error = status;
    return status;
}

int take_last_error(bool clear) {
    int status = last_error;
    if (clear) last_error = SUCCESS;
    return status;
}

void device_uuid(int number, unsigned char bytes[16]) {
    /* "memfit", then the device's number: nobody takes it for a real card's. */
    memset(bytes, 0, 16);
    memcpy(bytes, "memfit", 6);
    bytes[15] = (unsigned char)number;
}

/* Numbers of the attributes, the same in the runtime and in the driver. */
enum {
    THREADS_PER_BLOCK = 1, BLOCK_X, BLOCK_Y, BLOCK_Z, GRID_X, GRID_Y, GRID_Z, SHARED_PER_BLOCK, CONSTANT_MEMORY,
    WARP_SIZE, PITCH, REGISTERS_PER_BLOCK, CLOCK_RATE, TEXTURE_ALIGNMENT, OVERLAP, MULTIPROCESSORS,
    MAPS_HOST = 19, SURFACE_ALIGNMENT = 30, CONCURRENT_KERNELS, PCI_BUS = 33, MEMORY_CLOCK = 36, BUS_WIDTH, L2_BYTES, THREADS_PER_SM,
    COPY_ENGINES, UNIFIED_ADDRESSING, TEXTURE_PITCH = 51, MAJOR = 75, MINOR, STREAM_PRIORITIES = 78, GLOBAL_L1,
    LOCAL_L1, SHARED_PER_SM, REGISTERS_PER_SM, MANAGED, PREEMPTION = 90, HOST_POINTER, COOPERATIVE = 95,
    SHARED_OPTIN = 97, HOST_REGISTER = 99, VIRTUAL_MEMORY = 102, BLOCKS_PER_SM = 106, L2_PERSISTING = 108,
    ACCESS_WINDOW, RESERVED_SHARED = 111, MEMORY_POOLS = 115, CLUSTERS = 120,
};

int device_attribute(int attribute, int device, int *value) {
    const Card *c = card();
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    bool ampere = c->major >= 8;
    switch (attribute) {
    case THREADS_PER_BLOCK: case BLOCK_X: case BLOCK_Y: *value = 1024; break;
    case BLOCK_Z: *value = 64; break;
    case GRID_X: case PITCH: *value = 2147483647; break;
    case GRID_Y: case GRID_Z: *value = 65535; break;
    case SHARED_PER_BLOCK: *value = 48 << 10; break;
    case CONSTANT_MEMORY: case REGISTERS_PER_BLOCK: case REGISTERS_PER_SM: *value = 64 << 10; break;
    case WARP_SIZE: case TEXTURE_PITCH: *value = 32; break;
    case TEXTURE_ALIGNMENT: case SURFACE_ALIGNMENT: *value = 512; break;
    case CLOCK_RATE: *value = c->core_khz; break;
    case MEMORY_CLOCK: *value = c->memory_khz; break;
    case BUS_WIDTH: *value = c->bus_bits; break;
    case MULTIPROCESSORS: *value = c->sms; break;
    case THREADS_PER_SM: *value = c->threads_sm; break;
    case BLOCKS_PER_SM: *value = c->blocks_sm; break;
    case L2_BYTES: *value = c->l2; break;
    case L2_PERSISTING: *value = ampere ? c->l2 / 4 * 3 : 0; break;
    case ACCESS_WINDOW: *value = ampere ? 134213632 : 0; break;
    case COPY_ENGINES: *value = 3; break;
    case PCI_BUS: *value = device_number(device) + 1; break;
    case MAJOR: *value = c->major; break;
    case MINOR: *value = c->minor; break;
    case SHARED_PER_SM: *value = c->smem_sm; break;
    case SHARED_OPTIN: *value = c->smem_block; break;
    case RESERVED_SHARED: *value = ampere ? 1024 : 0; break;
    case CLUSTERS: *value = c->major >= 9; break;
    case OVERLAP: case MAPS_HOST: case CONCURRENT_KERNELS: case UNIFIED_ADDRESSING: case STREAM_PRIORITIES:
    case GLOBAL_L1: case LOCAL_L1: case MANAGED: case PREEMPTION: case HOST_POINTER: case COOPERATIVE:
    case HOST_REGISTER: case VIRTUAL_MEMORY: case MEMORY_POOLS: *value = 1; break;
    default: *value = 0; /* everything that memfit's virtual card does not offer */
    }
    return SUCCESS;
}

static int get_properties(Properties *out, int device) {
    const Card *c = card();
    if (device < 0 || device >= device_count()) return fail(INVALID_DEVICE);
    bool ampere = c->major >= 8;
    Properties p = {
        .total_memory = c->total, .shared_per_block = 48 << 10, .registers_per_block = 65536, .warp_size = 32,
        .pitch = 2147483647, .threads_per_block = 1024, .block_dim = {1024, 1024, 64},
        .grid_dim = {2147483647, 65535, 65535}, .constant_memory = 65536, .major = c->major, .minor = c->minor,
        .texture_alignment = 512, .texture_pitch_alignment = 32, .multiprocessors = c->sms, .maps_host_memory = 1,
        .surface_alignment = 512, .concurrent_kernels = 1, .pci_bus = device_number(device) + 1, .copy_engines = 3, .unified_addressing = 1,
        .bus_bits = c->bus_bits, .l2_bytes = c->l2, .l2_persisting_bytes = ampere ? c->l2 / 4 * 3 : 0,
        .threads_per_sm = c->threads_sm, .stream_priorities = 1, .global_l1 = 1, .local_l1 = 1,
        .shared_per_sm = (size_t)c->smem_sm, .registers_per_sm = 65536, .managed_memory = 1, .preemption = 1,
        .host_pointer_for_registered = 1, .cooperative_launch = 1, .shared_per_block_optin = (size_t)c->smem_block,
        .blocks_per_sm = c->blocks_sm, .access_window = ampere ? 134213632 : 0,
        .reserved_shared_per_block = ampere ? 1024 : 0, .host_register = 1, .memory_pools = 1,
        .cluster_launch = c->major >= 9,
    };
    ONLY_12(p.clock_rate = c->core_khz; p.memory_clock_rate = c->memory_khz; p.device_overlap = 1;)
    memcpy(p.name, c->shown, sizeof c->shown);
    device_uuid(device_number(device), p.uuid);
    *out = p;
    return SUCCESS;
}

#if VGPU_CUDA_MAJOR >= 13
API int cudaGetDeviceProperties(Properties *out, int device) { return get_properties(out, device); }
#else
API int cudaGetDeviceProperties_v2(Properties *out, int device) { return get_properties(out, device); }
#endif

API int cudaGetDeviceCount(int *count) {
    *count = device_count();
    return *count > 0 ? SUCCESS : fail(NO_DEVICE);
}

API int cudaGetDevice(int *device) {
    if (device_count() == 0) return fail(NO_DEVICE);
    *device = chosen;
    return SUCCESS;
}

API int cudaSetDevice(int device) {
    int status = set_current_device(device);
    return status ? fail(status) : SUCCESS;
}

API int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    int status = device_attribute(attribute, device, value);
    return status ? fail(status) : SUCCESS;
}

API int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    int count = device_count();
    if (device < 0 || device >= count || peer < 0 || peer >= count) return fail(INVALID_DEVICE);
    *can = device != peer;
    return SUCCESS;
}

API int cudaDeviceGetPCIBusId(char *text, int length, int device) {
    if (device < 0 || device >= device_count()) return fail(INVALID_DEVICE);
    snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)device_number(device) + 1);
    return SUCCESS;
}

API int cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 || bus < 1 || bus > MAX_DEVICES) return fail(INVALID_DEVICE);
    *device = device_with_number((int)bus - 1);
    return *device >= 0 ? SUCCESS : fail(INVALID_DEVICE);
}

API int cudaDriverGetVersion(int *version) {
    *version = VGPU_CUDA_VERSION;
    return SUCCESS;
}

API int cudaRuntimeGetVersion(int *version) {
    *version = VGPU_CUDA_VERSION;
    return SUCCESS;
}

API int cudaGetLastError(void) { return take_last_error(true); }

API int cudaPeekAtLastError(void) { return take_last_error(false); }

static const struct {
    int status;
    const char *name, *words;
} errors[] = {
    {SUCCESS, "cudaSuccess", "no error"},
    {INVALID_VALUE, "cudaErrorInvalidValue", "invalid argument"},
    {OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "out of memory"},
    {NOT_INITIALIZED, "cudaErrorInitializationError", "initialization error"},
    {NO_DEVICE, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {INVALID_FUNCTION, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {NO_KERNEL_IMAGE, "cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {NOT_FOUND, "cudaErrorSymbolNotFound", "named symbol not found"},
    {HOST_REGISTERED, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {NOT_REGISTERED, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {CAPTURE_INVALID, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};

static size_t error_index(int status) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].status == status) return i;
    return sizeof errors / sizeof *errors;
}

API const char *cudaGetErrorString(int status) {
    size_t i = error_index(status);
    return i < sizeof errors / sizeof *errors ? errors[i].words : "unrecognized error code";
}

API const char *cudaGetErrorName(int status) {
    size_t i = error_index(status);
    return i < sizeof errors / sizeof *errors ? errors[i].name : "unrecognized error code";
}

API int cuGetErrorString(int status, const char **text) {
    *text = cudaGetErrorString(status);
    return SUCCESS;
}

API int cuGetErrorName(int status, const char **text) {
    *text = cudaGetErrorName(status);
    return SUCCESS;
}
