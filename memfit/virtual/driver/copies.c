/* Copies and fills, and what a pointer is.
 *
 * A small copy is really made. A large one that touches the device would fill host memory with bytes that no kernel
 * computed: it is checked and skipped, and a host destination reads as zero, never as what lay there before. */
#include <string.h>

#include "vgpu.h"

enum { HOST, DEVICE, BROKEN };

/* Whether an address range lies on the host, wholly on a device, or partly on one. */
static int side(const void *address, size_t bytes) {
    void *base;
    size_t length;
    if (!memory_range(address, &base, &length)) return HOST;
    return memory_device(address, bytes) >= 0 ? DEVICE : BROKEN;
}

int copy_bytes(void *to, const void *from, size_t bytes) {
    if (bytes == 0) return SUCCESS;
    if (to == NULL || from == NULL) return fail(INVALID_VALUE);
    int target = side(to, bytes), source = side(from, bytes);
    if (target == BROKEN || source == BROKEN) return fail(INVALID_VALUE);
    int certainty = source == HOST && bytes <= SMALL ? VALUE_CERTAIN : VALUE_UNKNOWN;
    size_t known = certainty == VALUE_UNKNOWN ? 0 : bytes;
    if (source == DEVICE && bytes <= SMALL) {
        certainty = values_certainty(from, bytes);
        known = certainty == VALUE_UNKNOWN ? values_prefix(from, bytes) : bytes;
    }
    if (target == HOST) {
        if (source == HOST) memmove(to, from, bytes);
        else reads_answer(to, from, bytes);
        return SUCCESS;
    }
    if (known > 0) memmove(to, from, known);
    if (known < bytes) values_forget(to, bytes);
    if (known > 0) values_write_like(to, known, known < bytes ? VALUE_CHANGED : certainty);
    return SUCCESS;
}

int fill_bytes(void *to, int value, size_t bytes) {
    if (bytes == 0) return SUCCESS;
    int target = side(to, bytes);
    if (target == BROKEN || (target == HOST && !host_is_pinned(to))) return fail(INVALID_VALUE);
    if (bytes > SMALL) {
        values_forget(to, bytes);
        return SUCCESS;
    }
    memset(to, value, bytes);
    if (target == DEVICE) values_write(to, bytes);
    return SUCCESS;
}

int fill_words(void *to, uint32_t value, size_t words) {
    size_t bytes = words * sizeof value;
    if (words == 0) return SUCCESS;
    if (side(to, bytes) != DEVICE) return fail(INVALID_VALUE);
    if (bytes > SMALL) {
        values_forget(to, bytes);
        return SUCCESS;
    }
    for (size_t i = 0; i < words; i++) memcpy((char *)to + i * sizeof value, &value, sizeof value);
    values_write(to, bytes);
    return SUCCESS;
}

API int cudaMemcpy(void *to, const void *from, size_t bytes, UNUSED int kind) { return copy_bytes(to, from, bytes); }

API int cudaMemcpyAsync(void *to, const void *from, size_t bytes, UNUSED int kind, UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cudaMemcpyPeer(void *to, UNUSED int to_device, const void *from, UNUSED int from_device, size_t bytes) {
    return copy_bytes(to, from, bytes);
}

API int cudaMemcpyPeerAsync(void *to, UNUSED int to_device, const void *from, UNUSED int from_device, size_t bytes,
                            UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                          UNUSED int kind, UNUSED void *stream) {
    int status = SUCCESS;
    for (size_t row = 0; row < height && status == SUCCESS; row++)
        status = copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return status;
}

API int cudaMemset(void *to, int value, size_t bytes) { return fill_bytes(to, value, bytes); }

API int cudaMemsetAsync(void *to, int value, size_t bytes, UNUSED void *stream) { return fill_bytes(to, value, bytes); }

API int cuMemcpyHtoD_v2(void *to, const void *from, size_t bytes) { return copy_bytes(to, from, bytes); }

API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t bytes, UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cuMemcpyDtoH_v2(void *to, const void *from, size_t bytes) { return copy_bytes(to, from, bytes); }

API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t bytes, UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cuMemcpyDtoD_v2(void *to, const void *from, size_t bytes) { return copy_bytes(to, from, bytes); }

API int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t bytes, UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cuMemcpy(void *to, const void *from, size_t bytes) { return copy_bytes(to, from, bytes); }

API int cuMemcpyAsync(void *to, const void *from, size_t bytes, UNUSED void *stream) {
    return copy_bytes(to, from, bytes);
}

API int cuMemsetD8_v2(void *to, unsigned char value, size_t bytes) { return fill_bytes(to, value, bytes); }

API int cuMemsetD8Async(void *to, unsigned char value, size_t bytes, UNUSED void *stream) {
    return fill_bytes(to, value, bytes);
}

API int cuMemsetD32_v2(void *to, unsigned value, size_t words) { return fill_words(to, value, words); }

API int cuMemsetD32Async(void *to, unsigned value, size_t words, UNUSED void *stream) {
    return fill_words(to, value, words);
}

/* What the runtime says about a pointer. */
typedef struct {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    long reserved[8]; /* grown by CUDA 13 */
} PointerAttributes;

enum { POINTER_UNREGISTERED = 0, POINTER_HOST = 1, POINTER_DEVICE = 2 };
#if VGPU_CUDA_MAJOR >= 13
#define POINTER_ATTRIBUTES_SIZE sizeof(PointerAttributes)
#else
#define POINTER_ATTRIBUTES_SIZE offsetof(PointerAttributes, reserved)
#endif

API int cudaPointerGetAttributes(PointerAttributes *out, const void *address) {
    PointerAttributes found = {.type = POINTER_UNREGISTERED, .device = -2, .host_pointer = (void *)(uintptr_t)address};
    int device = memory_device(address, 1);
    if (device >= 0)
        found = (PointerAttributes){POINTER_DEVICE, device, (void *)(uintptr_t)address, NULL, {0}};
    else if (host_is_pinned(address)) {
        void *same = (void *)(uintptr_t)address;
        found = (PointerAttributes){POINTER_HOST, current_device(), same, same, {0}};
    }
    memcpy(out, &found, POINTER_ATTRIBUTES_SIZE);
    return SUCCESS;
}

API int cuPointerGetAttribute(void *out, int attribute, const void *address) {
    enum { CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, MANAGED = 8, ORDINAL, RANGE_START = 11, RANGE_SIZE };
    void *base = NULL;
    size_t bytes = 0;
    int device = memory_device(address, 1);
    if (device < 0 && !host_is_pinned(address)) return INVALID_VALUE;
    switch (attribute) {
    case CONTEXT: *(void **)out = (void *)(uintptr_t)1; return SUCCESS;
    case MEMORY_TYPE: *(unsigned *)out = device >= 0 ? 2 : 1; return SUCCESS;
    case DEVICE_POINTER: *(const void **)out = address; return SUCCESS;
    case HOST_POINTER:
        if (device >= 0) return INVALID_VALUE;
        *(const void **)out = address;
        return SUCCESS;
    case MANAGED: *(unsigned char *)out = 0; return SUCCESS;
    case ORDINAL: *(int *)out = device >= 0 ? device : current_device(); return SUCCESS;
    case RANGE_START:
    case RANGE_SIZE:
        if (!memory_range(address, &base, &bytes)) return INVALID_VALUE;
        if (attribute == RANGE_START) *(void **)out = base;
        else *(size_t *)out = bytes;
        return SUCCESS;
    default: return INVALID_VALUE;
    }
}
