/* Memory as the CUDA runtime offers it. */
#include <string.h>

#include "vgpu.h"

static int status_of(int status) { return status ? fail(status) : SUCCESS; }

API int cudaMalloc(void **out, size_t bytes) { return status_of(memory_allocate(current_device(), bytes, out)); }

API int cudaFree(void *address) { return status_of(memory_free(address)); }

API int cudaMallocAsync(void **out, size_t bytes, UNUSED void *stream) { return cudaMalloc(out, bytes); }

API int cudaMallocFromPoolAsync(void **out, size_t bytes, UNUSED void *pool, UNUSED void *stream) {
    return cudaMalloc(out, bytes);
}

API int cudaFreeAsync(void *address, UNUSED void *stream) { return cudaFree(address); }

API int cudaMallocManaged(void **out, size_t bytes, UNUSED unsigned flags) { return cudaMalloc(out, bytes); }

API int cudaMemGetInfo(size_t *available, size_t *total) {
    const Card *c = card();
    if (device_count() == 0) return fail(NO_DEVICE);
    memory_open_context(current_device());
    size_t used = memory_used(current_device());
    *total = c->total;
    *available = used < c->total ? c->total - used : 0;
    return SUCCESS;
}

API int cuMemGetInfo_v2(size_t *available, size_t *total) { return cudaMemGetInfo(available, total); }

API int cudaHostAlloc(void **out, size_t bytes, UNUSED unsigned flags) { return status_of(host_allocate(bytes, out)); }

API int cudaMallocHost(void **out, size_t bytes) { return status_of(host_allocate(bytes, out)); }

API int cudaFreeHost(void *address) { return status_of(host_free(address)); }

API int cudaHostRegister(void *address, size_t bytes, UNUSED unsigned flags) {
    return status_of(host_register(address, bytes));
}

API int cudaHostUnregister(void *address) { return status_of(host_unregister(address)); }

API int cudaHostGetDevicePointer(void **out, void *address, UNUSED unsigned flags) {
    *out = address;
    return host_is_pinned(address) ? SUCCESS : fail(INVALID_VALUE);
}

API int cudaHostGetFlags(unsigned *flags, void *address) {
    *flags = 0;
    return host_is_pinned(address) ? SUCCESS : fail(INVALID_VALUE);
}

/* Memory pools: one per device, whose figures are the device's own. */
API int cudaDeviceGetDefaultMemPool(void **pool, int device) {
    static char pools[MAX_DEVICES];
    if (device < 0 || device >= device_count()) return fail(INVALID_DEVICE);
    *pool = &pools[device];
    return SUCCESS;
}

API int cudaDeviceGetMemPool(void **pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }

API int cudaMemPoolGetAttribute(void *pool, int attribute, void *out) {
    enum { REUSE_LAST = 3, RESERVED_NOW = 5, RESERVED_HIGH, USED_NOW, USED_HIGH };
    void *first = NULL;
    cudaDeviceGetDefaultMemPool(&first, 0);
    ptrdiff_t index = (char *)pool - (char *)first;
    int device = index >= 0 && index < device_count() ? (int)index : current_device();
    switch (attribute) {
    case RESERVED_NOW: case USED_NOW: *(uint64_t *)out = memory_held(device); break;
    case RESERVED_HIGH: case USED_HIGH: *(uint64_t *)out = memory_held_peak(device); break;
    default:
        if (attribute <= REUSE_LAST) *(int *)out = 0;
        else *(uint64_t *)out = 0;
    }
    return SUCCESS;
}

/* A variable that lives on the device: each has a page of its own that reads as zero. */
API int cudaGetSymbolAddress(void **out, UNUSED const void *symbol) {
    static _Alignas(16) char zeros[64 * 1024];
    *out = zeros;
    return SUCCESS;
}
