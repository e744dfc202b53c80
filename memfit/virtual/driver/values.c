/* Which bytes of device memory are known.
 *
 * Kernels compute nothing, so most of device memory holds no value. Host code reads some of it all the same: a count,
 * a flag, a loss. What such a read yields must not depend on what lay there before, or a loop that waits for a flag
 * may never end. So small writes that really happened are remembered, and a read of anything else yields zeros:
 *
 *   - a read of exactly what was written yields it (a kernel that is really run, see small_kernels.c, is a write);
 *   - a read of a part of what was written yields it, unless it starts where a new tensor may have been placed and
 *     kernels have run since: then it is taken for their result, which is unknown.
 *
 * A single number is forgotten as soon as a kernel is given its address: a count or a flag that a kernel computes
 * often lies where another one lay before.
 *
 * An unknown flag is false too, but for one that a kernel computes by asking whether something holds for all elements:
 * a check such as isfinite().all() passes.
 *
 * The record is a table over granules of memory, the unit in which PyTorch places tensors. */
#include <pthread.h>
#include <stdatomic.h>

#include "vgpu.h"

enum { GRANULE = 512, SLOTS = 1 << 16, PLACES = 8 };

typedef struct {
    uintptr_t granule; /* number of the granule; 0 for an empty slot */
    uintptr_t start;
    size_t bytes;
    unsigned long kernels; /* how many kernels had run when it was written */
    bool doubtful; /* it came from values that a kernel may have changed */
} Record;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Record records[SLOTS];
static _Atomic unsigned long kernels_run;

static __thread bool affirmed;

void values_kernel_ran(bool affirms) {
    affirmed = affirms;
    atomic_fetch_add_explicit(&kernels_run, 1, memory_order_relaxed);
}

bool values_affirmed(void) { return affirmed; }

static unsigned long values_now(void) { return atomic_load_explicit(&kernels_run, memory_order_relaxed); }

/* The record of a granule, or else the one that it would replace: an empty one, or the oldest of its few places.
 * Tensors lie at multiples of large powers of two, so the granule's number is mixed before it picks the places. */
static Record *slot(uintptr_t granule) {
    Record *places = &records[((granule * 0x9E3779B97F4A7C15u) >> 40) % (SLOTS / PLACES) * PLACES];
    Record *oldest = places;
    for (Record *place = places; place < places + PLACES; place++) {
        if (place->granule == granule) return place;
        bool older = place->granule == 0 || (oldest->granule != 0 && place->kernels < oldest->kernels);
        if (older) oldest = place;
    }
    return oldest;
}

static uintptr_t end_of(const Record *record) { return record->start + record->bytes; }

static bool covers(const Record *record, uintptr_t start, uintptr_t end) {
    return start >= record->start && end <= end_of(record);
}

/* Adds a write to what a granule's record says. A write at the granule's start is a tensor of its own; one further
 * in belongs to the tensor that is there, and makes it known as far as the writes touch. */
static void add(Record *record, uintptr_t granule, uintptr_t start, uintptr_t end, bool doubtful) {
    unsigned long now = values_now();
    bool same = record->granule == granule && start % GRANULE != 0;
    if (same && covers(record, start, end)) return;
    if (same && start <= end_of(record) && end >= record->start) {
        if (record->start < start) start = record->start;
        if (end_of(record) > end) end = end_of(record);
        doubtful = doubtful || record->doubtful;
    }
    *record = (Record){granule, start, end - start, now, doubtful};
}

static void write(const void *address, size_t bytes, bool doubtful) {
    uintptr_t start = (uintptr_t)address, end = start + bytes;
    pthread_mutex_lock(&lock);
    for (uintptr_t granule = start / GRANULE; granule * GRANULE < end; granule++)
        add(slot(granule), granule, start, end, doubtful);
    pthread_mutex_unlock(&lock);
}

void values_write(const void *address, size_t bytes) { write(address, bytes, false); }

void values_write_like(const void *address, size_t bytes, int certainty) {
    if (certainty == VALUE_UNKNOWN) values_forget(address, bytes);
    else write(address, bytes, certainty == VALUE_CHANGED);
}

void values_forget(const void *address, size_t bytes) {
    uintptr_t first = (uintptr_t)address / GRANULE, last = ((uintptr_t)address + bytes - 1) / GRANULE;
    pthread_mutex_lock(&lock);
    if (last - first < SLOTS) {
        for (uintptr_t granule = first; granule <= last; granule++)
            if (slot(granule)->granule == granule) slot(granule)->granule = 0;
    } else {
        for (size_t i = 0; i < SLOTS; i++)
            if (records[i].granule >= first && records[i].granule <= last) records[i].granule = 0;
    }
    pthread_mutex_unlock(&lock);
}

int values_certainty(const void *address, size_t bytes) {
    uintptr_t start = (uintptr_t)address, end = start + bytes, granule = start / GRANULE;
    bool known = true, fresh = true, doubtful = false;
    unsigned long now = values_now();
    pthread_mutex_lock(&lock);
    bool starts_there = slot(granule)->start == start, ends_there = false;
    for (; known && granule * GRANULE < end; granule++) {
        const Record *record = slot(granule);
        uintptr_t from = granule * GRANULE > start ? granule * GRANULE : start;
        uintptr_t to = (granule + 1) * GRANULE < end ? (granule + 1) * GRANULE : end;
        known = record->granule == granule && covers(record, from, to);
        fresh = fresh && record->kernels == now;
        doubtful = doubtful || record->doubtful;
        ends_there = end_of(record) == end;
    }
    pthread_mutex_unlock(&lock);
    if (!known || !((starts_there && ends_there) || start % GRANULE != 0 || fresh)) return VALUE_UNKNOWN;
    return fresh && !doubtful ? VALUE_CERTAIN : VALUE_CHANGED;
}

void values_touch(const uintptr_t *words, size_t count) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < count; i++) {
        Record *record = slot(words[i] / GRANULE);
        bool there = record->granule == words[i] / GRANULE && record->start == words[i];
        bool single = record->bytes <= sizeof(int64_t) && (record->bytes & (record->bytes - 1)) == 0;
        if (there && single) record->granule = 0;
    }
    pthread_mutex_unlock(&lock);
}

size_t values_prefix(const void *address, size_t bytes) {
    uintptr_t start = (uintptr_t)address;
    size_t length = 0;
    pthread_mutex_lock(&lock);
    const Record *record = slot(start / GRANULE);
    if (record->granule == start / GRANULE && covers(record, start, start + 1) && record->kernels == values_now())
        length = end_of(record) - start;
    pthread_mutex_unlock(&lock);
    if (length > bytes) length = bytes;
    return length > 0 && values_known(address, length) ? length : 0;
}

bool values_known(const void *address, size_t bytes) { return values_certainty(address, bytes) != VALUE_UNKNOWN; }
