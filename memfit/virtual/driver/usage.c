/* The account of a virtual machine's devices, in a file that its processes share.
 *
 * Each process has an entry, and the lock on the entry's byte for as long as it lives. What an entry says of a process
 * that was killed counts for nothing, since nobody has its lock any more. */
#include "usage.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "machine.h"
#include "vgpu.h"

enum { MOST_MEMBERS = 256, WHOLE = MOST_MEMBERS }; /* the byte whose lock stands for the whole account */

typedef struct {
    _Atomic unsigned pid;
    _Atomic size_t held[MAX_DEVICES];
} Member;

typedef struct {
    Member members[MOST_MEMBERS];
    _Atomic size_t peak[MAX_DEVICES];
} Usage;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* byte locks keep processes apart, not threads */
static Usage *usage;
static int file;
static Member *own;
static pid_t owner; /* the process that `own` belongs to: a fork has to find one for itself */

/* Opens the account; false where there is none. The lock is held. */
static bool opened(void) {
    static bool tried;
    if (!tried) usage = machine_map("usage", sizeof *usage, &file);
    tried = true;
    if (usage != NULL && !machine_room(file, 0, sizeof *usage)) usage = NULL;
    return usage != NULL;
}

/* Finds an entry for this process; the lock is held. */
static bool joined(void) {
    if (owner == getpid()) return own != NULL;
    owner = getpid();
    own = NULL;
    for (size_t i = 0; i < MOST_MEMBERS && own == NULL; i++) {
        if (!machine_lock(file, i, false)) continue;
        own = &usage->members[i];
        for (int device = 0; device < MAX_DEVICES; device++) own->held[device] = 0;
        own->pid = (unsigned)owner;
    }
    if (own == NULL)
        fprintf(stderr, "memfit: more than %d processes share a virtual machine; this one is not counted\n",
                MOST_MEMBERS);
    return own != NULL;
}

static bool lives(size_t index) { return machine_locked(file, index); }

/* The lock is held. */
static size_t others(int device) {
    size_t bytes = 0;
    for (size_t i = 0; i < MOST_MEMBERS; i++) {
        const Member *member = &usage->members[i];
        bool mine = member == own && owner == getpid();
        if (!mine && member->held[device] > 0 && lives(i)) bytes += member->held[device];
    }
    return bytes;
}

bool usage_hold(int device, size_t bytes) {
    bool fits = true;
    pthread_mutex_lock(&lock);
    if (opened() && joined()) {
        machine_lock(file, WHOLE, true);
        size_t whole = others(device) + bytes;
        fits = whole <= card()->total || bytes <= own->held[device];
        if (fits) own->held[device] = bytes;
        if (fits && whole > usage->peak[device]) usage->peak[device] = whole;
        machine_unlock(file, WHOLE);
    }
    pthread_mutex_unlock(&lock);
    return fits;
}

size_t usage_others(int device) {
    pthread_mutex_lock(&lock);
    size_t bytes = opened() ? others(device) : 0;
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t usage_peak(int device) {
    pthread_mutex_lock(&lock);
    size_t bytes = opened() ? usage->peak[device] : 0;
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t usage_holders(int device, Holder *out, size_t room) {
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; opened() && i < MOST_MEMBERS; i++) {
        const Member *member = &usage->members[i];
        bool mine = member == own && owner == getpid();
        if (mine || member->held[device] == 0 || !lives(i)) continue;
        if (count < room) out[count] = (Holder){member->pid, member->held[device]};
        count++;
    }
    pthread_mutex_unlock(&lock);
    return count;
}
