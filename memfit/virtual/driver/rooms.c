/* Rooms: a pair of slots from each rank of a communicator to each other, in a file that the ranks' processes share.
 *
 * A sender fills a slot and counts up, a receiver empties it and counts up: nobody else writes these counters, so no
 * lock is needed. Who waits sleeps on the counter, and looks now and then whether the peer still lives. */
#define _GNU_SOURCE
#include "rooms.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"
#include "vgpu.h"

enum { SLOTS = 2, MOST_RANKS = 128, LATE_S = 60 };
static const long LOOK_NS = 50000000; /* how long to sleep before looking for the peer */

typedef struct {
    size_t size;
    int certainty;
    char bytes[SMALL];
} Slot;

typedef struct {
    _Atomic unsigned sent, taken;
    Slot slots[SLOTS];
} Box;

typedef struct {
    _Atomic unsigned bell; /* rung whenever anything in the room changes */
    _Atomic unsigned present[MOST_RANKS];
    Box boxes[]; /* from each rank to each rank */
} Shared;

struct Room {
    Shared *shared;
    int file; /* -1 for a private room */
    int ranks, rank;
    _Atomic int *users; /* of a private room's memory */
    unsigned stuck[2][MOST_RANKS]; /* the turn in which a peer's box could not be used, in each direction */
};

static size_t room_bytes(int ranks) { return sizeof(Shared) + (size_t)ranks * (size_t)ranks * sizeof(Box); }

static void ring(Shared *shared) {
    atomic_fetch_add(&shared->bell, 1);
    syscall(SYS_futex, &shared->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Sleeps until the bell rings again, or for a moment. */
static void sleep_until_rung(Shared *shared, unsigned heard) {
    struct timespec moment = {0, LOOK_NS};
    syscall(SYS_futex, &shared->bell, FUTEX_WAIT, heard, &moment, NULL, 0);
}

Room *room_enter(const char *name, int ranks, int rank) {
    if (!machine_shared() || ranks > MOST_RANKS) return NULL;
    Room *room = calloc(1, sizeof *room);
    if (room == NULL) return NULL;
    room->ranks = ranks;
    room->rank = rank;
    room->shared = machine_map(name, room_bytes(ranks), &room->file);
    if (room->shared == NULL || !machine_room(room->file, 0, sizeof(Shared))) {
        free(room);
        return NULL;
    }
    machine_lock(room->file, (size_t)rank, true);
    room->shared->present[rank] = 1;
    ring(room->shared);
    time_t began = time(NULL);
    for (bool told = false;;) {
        unsigned heard = room->shared->bell;
        int here = 0;
        for (int i = 0; i < ranks; i++) here += room->shared->present[i] != 0;
        if (here == ranks) return room;
        if (!told && time(NULL) - began >= LATE_S) {
            fprintf(stderr, "memfit: rank %d waits for %d of %d ranks to set up their NCCL communicator\n", rank,
                    ranks - here, ranks);
            told = true;
        }
        sleep_until_rung(room->shared, heard);
    }
}

Room *room_private(int ranks) {
    Room *room = calloc(1, sizeof *room);
    if (room == NULL || ranks > MOST_RANKS) return NULL;
    room->users = malloc(sizeof *room->users);
    room->shared = mmap(NULL, room_bytes(ranks), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room->users == NULL || room->shared == MAP_FAILED) return NULL;
    *room->users = 1;
    room->file = -1;
    room->ranks = ranks;
    return room;
}

Room *room_share(Room *room, int rank) {
    Room *another = malloc(sizeof *another);
    if (another == NULL) return NULL;
    *another = *room;
    another->rank = rank;
    atomic_fetch_add(room->users, 1);
    return another;
}

void room_leave(Room *room) {
    if (room == NULL) return;
    bool last = room->users == NULL || atomic_fetch_sub(room->users, 1) == 1;
    if (room->users == NULL) close(room->file); /* nobody else in this process is in the room: the lock may go */
    if (last) {
        munmap(room->shared, room_bytes(room->ranks));
        free(room->users);
    }
    free(room);
}

static Box *box(const Room *room, int from, int to) { return &room->shared->boxes[from * room->ranks + to]; }

/* Whether a peer's process has ended. */
static bool is_gone(const Room *room, int peer) {
    return room->file >= 0 && peer != room->rank && !machine_locked(room->file, (size_t)peer);
}

static bool put(Room *room, const Message *message) {
    Box *to = box(room, room->rank, message->peer);
    unsigned number = to->sent;
    if (number - to->taken == SLOTS) return false;
    Slot *slot = &to->slots[number % SLOTS];
    size_t size = message->certainty == VALUE_UNKNOWN ? 0 : message->size;
    size_t needed = offsetof(Slot, bytes) + size;
    if (room->file >= 0 && !machine_room(room->file, (size_t)((char *)slot - (char *)room->shared), needed)) size = 0;
    slot->size = size;
    slot->certainty = size == message->size ? message->certainty : VALUE_UNKNOWN;
    memcpy(slot->bytes, message->bytes, size);
    atomic_store(&to->sent, number + 1);
    return true;
}

/* A message of another size than was asked for is as good as an unknown one. */
static bool take(Room *room, Message *message) {
    Box *from = box(room, message->peer, room->rank);
    unsigned number = from->taken;
    if (from->sent == number) return false;
    const Slot *slot = &from->slots[number % SLOTS];
    message->certainty = slot->size == message->size ? slot->certainty : VALUE_UNKNOWN;
    if (message->certainty != VALUE_UNKNOWN) memcpy(message->bytes, slot->bytes, message->size);
    atomic_store(&from->taken, number + 1);
    return true;
}

bool rooms_pass(Message *messages, size_t count) {
    static _Atomic unsigned turns;
    size_t left = count;
    while (left > 0) {
        unsigned turn = atomic_fetch_add(&turns, 1) + 1;
        bool moved = false;
        Message *waits = NULL;
        unsigned heard = 0;
        for (Message *message = messages; message < messages + count; message++) {
            Room *room = message->room;
            unsigned *stuck = &room->stuck[message->sends][message->peer];
            if (message->done || *stuck == turn) continue; /* what was sent first arrives first */
            if (waits == NULL) heard = room->shared->bell;
            message->done = message->sends ? put(room, message) : take(room, message);
            if (message->done) {
                ring(room->shared);
                moved = true;
                left--;
            } else {
                *stuck = turn;
                if (waits == NULL) waits = message;
            }
        }
        if (moved || waits == NULL) continue;
        sleep_until_rung(waits->room->shared, heard);
        if (is_gone(waits->room, waits->peer)) {
            waits->done = waits->sends ? put(waits->room, waits) : take(waits->room, waits);
            if (!waits->done) return false;
            left--;
        }
    }
    return true;
}
