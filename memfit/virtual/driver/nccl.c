/* NCCL: communicators. What their ranks say to each other is in nccl_collectives.c.
 *
 * Ranks that run in processes of one virtual machine meet in a room, and small messages whose values are known are
 * really exchanged. Anywhere else one process stands for any rank of any number, and every other rank is taken to be
 * a copy of it. The device memory that a real NCCL takes beside PyTorch's is not charged. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "vgpu.h"

typedef struct {
    unsigned char bytes[128];
} UniqueId;

static int open_communicator(Communicator **out, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks) return NCCL_INVALID_ARGUMENT;
    *out = calloc(1, sizeof **out);
    if (*out == NULL) return NCCL_SYSTEM_ERROR;
    (*out)->ranks = ranks;
    (*out)->rank = rank;
    (*out)->device = current_device();
    pthread_mutex_init(&(*out)->lock, NULL);
    return SUCCESS;
}

API int ncclGetVersion(int *version) {
    *version = VGPU_NCCL_VERSION;
    return SUCCESS;
}

API int ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    return getrandom(id, 16, 0) == 16 ? SUCCESS : NCCL_SYSTEM_ERROR;
}

API int ncclCommGetUniqueId(UNUSED Communicator *communicator, UniqueId *id) { return ncclGetUniqueId(id); }

/* Enters the room of a communicator that has its name. */
static void enter(Communicator *communicator) {
    char file[64];
    snprintf(file, sizeof file, "nccl-%s", communicator->name);
    communicator->room = room_enter(file, communicator->ranks, communicator->rank);
}

API int ncclCommInitRank(Communicator **out, int ranks, UniqueId id, int rank) {
    int status = open_communicator(out, ranks, rank);
    if (status != SUCCESS) return status;
    for (size_t i = 0; i < 16; i++) snprintf((*out)->name + 2 * i, 3, "%02x", id.bytes[i]);
    enter(*out);
    return SUCCESS;
}

API int ncclCommInitRankConfig(Communicator **out, int ranks, UniqueId id, int rank, UNUSED void *config) {
    return ncclCommInitRank(out, ranks, id, rank);
}

API int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, UNUSED int count, UniqueId *ids,
                                 UNUSED void *config) {
    return ncclCommInitRank(out, ranks, ids[0], rank);
}

API int ncclCommInitAll(Communicator **out, int ranks, const int *device_list) {
    Room *room = room_private(ranks);
    for (int rank = 0; rank < ranks; rank++) {
        int status = open_communicator(&out[rank], ranks, rank);
        if (status != SUCCESS) return status;
        out[rank]->device = device_list ? device_list[rank] : rank;
        out[rank]->room = room ? room_share(room, rank) : NULL;
    }
    room_leave(room);
    return SUCCESS;
}

/* The name of a part of a communicator: a digest of the whole one's, of how many were split off before, and of the
 * part's color. */
static void name_part(Communicator *part, const Communicator *whole, int color) {
    uint64_t digest = 0xcbf29ce484222325U;
    char text[96];
    snprintf(text, sizeof text, "%s.%u.%d", whole->name, whole->splits, color);
    for (const char *at = text; *at; at++) digest = (digest ^ (unsigned char)*at) * 0x100000001b3U;
    snprintf(part->name, sizeof part->name, "%016llx-%.16s", (unsigned long long)digest, whole->name);
}

API int ncclCommSplit(Communicator *parent, int color, int key, Communicator **out, UNUSED void *config) {
    typedef struct {
        int color, key;
    } Wish;
    *out = NULL;
    parent->splits++;
    if (parent->room == NULL) {
        if (color < 0) return SUCCESS;
        int status = open_communicator(out, parent->ranks, parent->rank);
        if (status == SUCCESS) (*out)->split = true;
        return status;
    }
    Wish own = {color, key}, *all = calloc((size_t)parent->ranks, sizeof *all);
    int status = all ? nccl_gather_bytes(parent, &own, all, sizeof own) : NCCL_SYSTEM_ERROR;
    int ranks = 0, rank = 0;
    for (int i = 0; status == SUCCESS && i < parent->ranks; i++) {
        if (all[i].color != color) continue;
        ranks++;
        rank += all[i].key < key || (all[i].key == key && i < parent->rank);
    }
    free(all);
    if (status != SUCCESS || color < 0) return status;
    status = open_communicator(out, ranks, rank);
    if (status != SUCCESS) return status;
    name_part(*out, parent, color);
    enter(*out);
    return SUCCESS;
}

API int ncclCommDestroy(Communicator *communicator) {
    room_leave(communicator->room);
    free(communicator);
    return SUCCESS;
}

/* Another thread may be passing messages: what it uses stays. */
API int ncclCommAbort(UNUSED Communicator *communicator) { return SUCCESS; }

API int ncclCommGetAsyncError(UNUSED Communicator *communicator, int *status) {
    *status = SUCCESS;
    return SUCCESS;
}

API int ncclCommCount(const Communicator *communicator, int *ranks) {
    *ranks = communicator->ranks;
    return SUCCESS;
}

API int ncclCommUserRank(const Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return SUCCESS;
}

API int ncclCommCuDevice(const Communicator *communicator, int *device) {
    *device = communicator->device;
    return SUCCESS;
}

API const char *ncclGetErrorString(int status) {
    switch (status) {
    case SUCCESS: return "no error";
    case NCCL_SYSTEM_ERROR: return "unhandled system error";
    case NCCL_REMOTE_ERROR: return "remote process exited or there was a network error";
    default: return "invalid argument";
    }
}

API const char *ncclGetLastError(UNUSED const Communicator *communicator) { return ""; }

API int ncclMemAlloc(void **out, size_t bytes) {
    return memory_allocate(current_device(), bytes, out) ? NCCL_SYSTEM_ERROR : SUCCESS;
}

API int ncclMemFree(void *address) { return memory_free(address) ? NCCL_INVALID_ARGUMENT : SUCCESS; }
