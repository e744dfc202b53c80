/* Virtual memory management: address ranges, physical memory, and the mapping of one into the other.
 *
 * Expandable segments are built of it. Physical memory is charged when it is created, and given back when its
 * handle was released and its last mapping is gone. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

typedef struct {
    size_t bytes;
    int device;
    int holds; /* one for the handle, one for each mapping */
} Physical;

typedef struct {
    char *start;
    size_t bytes;
    Physical *physical;
} Mapping;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Mapping *mappings; /* sorted by address */
static size_t count, capacity;

/* The allocation's properties, of which only the place matters here. */
typedef struct {
    int type, handle_types;
    int place, place_id;
} Properties;

API int cuMemGetAllocationGranularity(size_t *bytes, UNUSED const Properties *properties, UNUSED int option) {
    *bytes = PAGE;
    return SUCCESS;
}

API int cuMemAddressReserve(void **out, size_t bytes, UNUSED size_t alignment, UNUSED void *wish,
                            UNUSED unsigned long long flags) {
    return memory_reserve(bytes, out);
}

API int cuMemAddressFree(void *address, UNUSED size_t bytes) { return memory_unreserve(address); }

API int cuMemCreate(Physical **out, size_t bytes, const Properties *properties, UNUSED unsigned long long flags) {
    enum { ON_DEVICE = 1 };
    if (bytes == 0 || bytes % PAGE != 0 || properties->place != ON_DEVICE) return INVALID_VALUE;
    int status = memory_charge(properties->place_id, bytes);
    if (status != SUCCESS) return status;
    *out = malloc(sizeof **out);
    if (*out == NULL) {
        memory_discharge(properties->place_id, bytes);
        return OUT_OF_MEMORY;
    }
    **out = (Physical){bytes, properties->place_id, 1};
    return SUCCESS;
}

/* The lock is held. */
static void let_go(Physical *physical) {
    if (--physical->holds > 0) return;
    memory_discharge(physical->device, physical->bytes);
    free(physical);
}

API int cuMemRelease(Physical *physical) {
    pthread_mutex_lock(&lock);
    let_go(physical);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static size_t above(const char *address) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (mappings[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static const Mapping *holder(const char *address) {
    size_t next = above(address);
    if (next == 0 || address >= mappings[next - 1].start + mappings[next - 1].bytes) return NULL;
    return &mappings[next - 1];
}

API int cuMemMap(char *address, size_t bytes, UNUSED size_t offset, Physical *physical,
                 UNUSED unsigned long long flags) {
    void *base;
    size_t length;
    if (!memory_range(address, &base, &length)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    int status = holder(address) ? INVALID_VALUE : SUCCESS;
    if (status == SUCCESS && count == capacity) {
        size_t larger = capacity ? 2 * capacity : 256;
        Mapping *moved = realloc(mappings, larger * sizeof *moved);
        if (moved == NULL) status = OUT_OF_MEMORY;
        else {
            mappings = moved;
            capacity = larger;
        }
    }
    if (status == SUCCESS) {
        size_t index = above(address);
        memmove(&mappings[index + 1], &mappings[index], (count - index) * sizeof(Mapping));
        mappings[index] = (Mapping){address, bytes, physical};
        count++;
        physical->holds++;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

API int cuMemUnmap(char *address, size_t bytes) {
    pthread_mutex_lock(&lock);
    const Mapping *found = holder(address);
    size_t first = found ? (size_t)(found - mappings) : above(address), last = first;
    while (last < count && mappings[last].start < address + bytes) let_go(mappings[last++].physical);
    if (last > first) {
        memmove(&mappings[first], &mappings[last], (count - last) * sizeof(Mapping));
        count -= last - first;
        memory_wipe(address, bytes);
    }
    pthread_mutex_unlock(&lock);
    return last > first ? SUCCESS : INVALID_VALUE;
}

API int cuMemSetAccess(UNUSED char *address, UNUSED size_t bytes, UNUSED const void *access, UNUSED size_t entries) {
    return SUCCESS;
}

int mapped_device(const void *address) {
    pthread_mutex_lock(&lock);
    const Mapping *found = holder(address);
    int device = found ? found->physical->device : -1;
    pthread_mutex_unlock(&lock);
    return device;
}
