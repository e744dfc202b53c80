/* Device memory: who owns which addresses, and how much of each device is used.
 *
 * Each device has a stretch of address space with no storage behind it. Blocks in it are kept in an array sorted
 * by address: a pointer is found by bisection, and a new block goes into the lowest gap that holds it, so that
 * addresses ascend as on a card. The caching allocator breaks ties by address, so the order matters.
 * Each allocation is charged in whole pages, which is what PyTorch asks for; a card would put several smaller ones
 * into one page. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "usage.h"
#include "machine.h"
#include "vgpu.h"

typedef struct {
    char *start;
    size_t bytes;
    size_t rounding; /* of these bytes, what was not asked for */
} Block;

typedef struct {
    char *base;       /* NULL until first used */
    size_t bytes;
    Block *blocks;    /* sorted by address, never overlapping */
    size_t count, capacity;
    size_t packed;    /* blocks before this index touch each other: no gap to look for */
} Space;

static const size_t DEVICE_SPACE = 4 * TIB;
static const size_t RESERVED_SPACE = 32 * TIB;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Space devices[MAX_DEVICES]; /* ordinary allocations */
static Space reserved;             /* address ranges into which physical memory is mapped */
static Space pinned;               /* host memory that is page-locked; it has no base of its own */
static size_t used[MAX_DEVICES], peak[MAX_DEVICES]; /* without the context */
static size_t rounding[MAX_DEVICES], peak_rounding[MAX_DEVICES]; /* part of it */
static bool opened[MAX_DEVICES];   /* this process has a context on the device */
static _Atomic uintptr_t lowest, highest; /* the stretch that holds all spaces */
static bool touched;               /* something was allocated, so sizes are settled */

static size_t round_up(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Index of the first block that starts above the address. */
static size_t above(const Space *space, const char *address) {
    size_t low = 0, high = space->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (space->blocks[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static const Block *holder(const Space *space, const void *address) {
    size_t next = above(space, address);
    if (next == 0) return NULL;
    const Block *block = &space->blocks[next - 1];
    return (const char *)address < block->start + block->bytes ? block : NULL;
}

static bool insert(Space *space, size_t index, char *start, size_t bytes) {
    if (space->count == space->capacity) {
        size_t capacity = space->capacity ? 2 * space->capacity : 256;
        Block *larger = realloc(space->blocks, capacity * sizeof *larger);
        if (larger == NULL) return false;
        space->blocks = larger;
        space->capacity = capacity;
    }
    memmove(&space->blocks[index + 1], &space->blocks[index], (space->count - index) * sizeof(Block));
    space->blocks[index] = (Block){start, bytes, 0};
    space->count++;
    return true;
}

/* Removes the block that starts at the address and returns it; an empty one when there is none. */
static Block take_out(Space *space, const void *address) {
    const Block *block = holder(space, address);
    if (block == NULL || block->start != (const char *)address) return (Block){0};
    size_t index = (size_t)(block - space->blocks);
    Block taken = *block;
    memmove(&space->blocks[index], &space->blocks[index + 1], (space->count - index - 1) * sizeof(Block));
    space->count--;
    if (index < space->packed) space->packed = index;
    return taken;
}

static bool open_space(Space *space, size_t bytes) {
    if (space->base != NULL) return true;
    void *raw = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        fprintf(stderr, "memfit: the virtual GPU cannot reserve %zu TiB of address space (ulimit -v?)\n",
                bytes / TIB);
        return false;
    }
    /* One touched byte must not bring 2 MiB of storage with it. */
    madvise(raw, bytes + PAGE, MADV_NOHUGEPAGE);
    space->base = (char *)round_up((size_t)raw);
    space->bytes = bytes;
    if (lowest == 0 || (uintptr_t)raw < lowest) lowest = (uintptr_t)raw;
    if ((uintptr_t)raw + bytes > highest) highest = (uintptr_t)raw + bytes;
    return true;
}

/* Places a block into the lowest gap of a space; NULL when there is none. */
static char *place(Space *space, size_t bytes) {
    size_t index = space->packed;
    char *at = index ? space->blocks[index - 1].start + space->blocks[index - 1].bytes : space->base;
    while (index < space->count && space->blocks[index].start < at + bytes) {
        if (space->blocks[index].start == at && index == space->packed) space->packed = index + 1;
        at = space->blocks[index].start + space->blocks[index].bytes;
        index++;
    }
    if (at + bytes > space->base + space->bytes) return NULL;
    return insert(space, index, at, bytes) ? at : NULL;
}

/* Tells the other processes of this machine what this one holds; false when they leave no room for it. */
static bool hold(int device, size_t bytes) { return usage_hold(device_number(device), card()->context + bytes); }

static int charge(int device, size_t bytes) {
    const Card *c = card();
    if (device < 0 || device >= device_count()) return INVALID_DEVICE;
    touched = opened[device] = true;
    if (bytes > c->total - c->context - used[device] || !hold(device, used[device] + bytes)) return OUT_OF_MEMORY;
    used[device] += bytes;
    if (used[device] > peak[device]) {
        peak[device] = used[device];
        peak_rounding[device] = rounding[device];
    }
    return SUCCESS;
}

static void discharge(int device, size_t bytes) {
    if (bytes == 0) return;
    used[device] -= bytes;
    hold(device, used[device]);
}

int memory_allocate(int device, size_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0) return SUCCESS;
    if (bytes > TIB) return OUT_OF_MEMORY;
    size_t asked = bytes;
    bytes = round_up(bytes);
    pthread_mutex_lock(&lock);
    bool exists = device >= 0 && device < device_count();
    if (exists) rounding[device] += bytes - asked;
    int status = charge(device, bytes);
    if (status == SUCCESS) {
        Space *space = &devices[device];
        *out = open_space(space, DEVICE_SPACE) ? place(space, bytes) : NULL;
        if (*out == NULL) {
            discharge(device, bytes);
            status = OUT_OF_MEMORY;
        } else {
            space->blocks[above(space, *out) - 1].rounding = bytes - asked;
        }
    }
    if (exists && status != SUCCESS) rounding[device] -= bytes - asked;
    pthread_mutex_unlock(&lock);
    return status;
}

void memory_wipe(void *address, size_t bytes) { madvise(address, bytes, MADV_DONTNEED); }

int memory_free(void *address) {
    if (address == NULL) return SUCCESS;
    size_t bytes = 0;
    pthread_mutex_lock(&lock);
    for (int device = 0; device < MAX_DEVICES && bytes == 0; device++) {
        Block taken = take_out(&devices[device], address);
        bytes = taken.bytes;
        rounding[device] -= taken.rounding;
        discharge(device, bytes);
        /* Wiped under the lock: another thread may be given these addresses next. */
        if (bytes) memory_wipe(address, bytes);
    }
    pthread_mutex_unlock(&lock);
    return bytes ? SUCCESS : INVALID_VALUE;
}

int memory_reserve(size_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0 || bytes > RESERVED_SPACE) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (open_space(&reserved, RESERVED_SPACE)) *out = place(&reserved, round_up(bytes));
    pthread_mutex_unlock(&lock);
    return *out ? SUCCESS : OUT_OF_MEMORY;
}

int memory_unreserve(void *address) {
    pthread_mutex_lock(&lock);
    size_t bytes = take_out(&reserved, address).bytes;
    if (bytes) memory_wipe(address, bytes);
    pthread_mutex_unlock(&lock);
    return bytes ? SUCCESS : INVALID_VALUE;
}

int memory_charge(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    int status = charge(device, bytes);
    pthread_mutex_unlock(&lock);
    return status;
}

void memory_discharge(int device, size_t bytes) {
    pthread_mutex_lock(&lock);
    discharge(device, bytes);
    pthread_mutex_unlock(&lock);
}

static size_t locked(const size_t *figures, int device) {
    if (device < 0 || device >= device_count()) return 0;
    pthread_mutex_lock(&lock);
    size_t bytes = figures[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t memory_held(int device) { return locked(used, device); }

size_t memory_held_peak(int device) { return locked(peak, device); }

size_t memory_rounding(int device) { return locked(peak_rounding, device); }

/* Where others may look at the device, a context counts from the first use on; a process alone has one anyway. */
size_t memory_context(int device) { return opened[device] || !machine_shared() ? card()->context : 0; }

size_t memory_used(int device) {
    if (device < 0 || device >= device_count()) return 0;
    return memory_context(device) + memory_held(device) + usage_others(device_number(device));
}

size_t memory_used_peak(int device) {
    if (device < 0 || device >= device_count()) return 0;
    size_t alone = memory_context(device) + memory_held_peak(device), shared = usage_peak(device_number(device));
    return shared > alone ? shared : alone;
}

void memory_open_context(int device) {
    if (device < 0 || device >= device_count()) return;
    pthread_mutex_lock(&lock);
    opened[device] = true;
    hold(device, used[device]);
    pthread_mutex_unlock(&lock);
}

bool memory_untouched(void) { return !touched; }

bool memory_may_hold(uintptr_t address) { return address >= lowest && address < highest; }

static bool within(const Space *space, const void *address) {
    const char *at = address;
    return space->base != NULL && at >= space->base && at < space->base + space->bytes;
}

/* The space of device memory that an address lies in, or NULL; `device` is -1 for a reservation. */
static const Space *space_of(const void *address, int *device) {
    for (*device = 0; *device < MAX_DEVICES; (*device)++)
        if (within(&devices[*device], address)) return &devices[*device];
    *device = -1;
    return within(&reserved, address) ? &reserved : NULL;
}

bool memory_range(const void *address, void **base, size_t *bytes) {
    int device;
    pthread_mutex_lock(&lock);
    const Space *space = space_of(address, &device);
    const Block *block = space ? holder(space, address) : NULL;
    if (block != NULL) {
        *base = block->start;
        *bytes = block->bytes;
    }
    pthread_mutex_unlock(&lock);
    return block != NULL;
}

int memory_device(const void *address, size_t bytes) {
    int device;
    pthread_mutex_lock(&lock);
    const Space *space = space_of(address, &device);
    const Block *block = space ? holder(space, address) : NULL;
    bool whole = block != NULL && (const char *)address + bytes <= block->start + block->bytes;
    pthread_mutex_unlock(&lock);
    if (!whole) return -1;
    return device >= 0 ? device : mapped_device(address);
}

int host_register(void *address, size_t bytes) {
    if (address == NULL || bytes == 0) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    bool known = holder(&pinned, address) != NULL;
    bool stored = !known && insert(&pinned, above(&pinned, address), address, bytes);
    pthread_mutex_unlock(&lock);
    return known ? HOST_REGISTERED : stored ? SUCCESS : OUT_OF_MEMORY;
}

int host_unregister(void *address) {
    pthread_mutex_lock(&lock);
    size_t bytes = take_out(&pinned, address).bytes;
    pthread_mutex_unlock(&lock);
    return bytes ? SUCCESS : NOT_REGISTERED;
}

int host_allocate(size_t bytes, void **out) {
    *out = NULL;
    if (bytes == 0) return SUCCESS;
    if (posix_memalign(out, 4 * KIB, bytes) != 0) return OUT_OF_MEMORY;
    int status = host_register(*out, bytes);
    if (status != SUCCESS) {
        free(*out);
        *out = NULL;
    }
    return status;
}

int host_free(void *address) {
    if (address == NULL) return SUCCESS;
    int status = host_unregister(address);
    if (status == SUCCESS) free(address);
    return status == SUCCESS ? SUCCESS : INVALID_VALUE;
}

bool host_is_pinned(const void *address) {
    pthread_mutex_lock(&lock);
    bool found = holder(&pinned, address) != NULL;
    pthread_mutex_unlock(&lock);
    return found;
}
