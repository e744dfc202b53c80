/* NCCL in which every rank is a copy of this one: a collective over n ranks yields what n equal ranks would hold.
 *
 * One process can so stand for any rank of any number. Values of sums are this rank's own; sizes are exact. The
 * device memory that a real NCCL takes beside PyTorch's is not charged. */
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

typedef struct {
    int ranks, rank, device;
    bool split; /* made of another one: NCCL would ask all ranks for its size, so `ranks` is only the most it can be */
} Communicator;

typedef struct {
    char bytes[128];
} UniqueId;

enum { NCCL_INVALID_ARGUMENT = 4, NCCL_SYSTEM_ERROR = 2 };

static size_t element_bytes(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < (int)(sizeof sizes / sizeof *sizes) ? sizes[type] : 4;
}

static int open_communicator(Communicator **out, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks) return NCCL_INVALID_ARGUMENT;
    *out = malloc(sizeof **out);
    if (*out == NULL) return NCCL_SYSTEM_ERROR;
    **out = (Communicator){ranks, rank, current_device(), false};
    return SUCCESS;
}

API int ncclGetVersion(int *version) {
    *version = VGPU_NCCL_VERSION;
    return SUCCESS;
}

API int ncclGetUniqueId(UniqueId *id) {
    memset(id, 7, sizeof *id);
    return SUCCESS;
}

API int ncclCommGetUniqueId(UNUSED Communicator *communicator, UniqueId *id) { return ncclGetUniqueId(id); }

API int ncclCommInitRank(Communicator **out, int ranks, UNUSED UniqueId id, int rank) {
    return open_communicator(out, ranks, rank);
}

API int ncclCommInitRankConfig(Communicator **out, int ranks, UNUSED UniqueId id, int rank, UNUSED void *config) {
    return open_communicator(out, ranks, rank);
}

API int ncclCommInitRankScalable(Communicator **out, int ranks, int rank, UNUSED int count, UNUSED UniqueId *ids,
                                 UNUSED void *config) {
    return open_communicator(out, ranks, rank);
}

API int ncclCommInitAll(Communicator **out, int ranks, const int *device_list) {
    for (int rank = 0; rank < ranks; rank++) {
        int status = open_communicator(&out[rank], ranks, rank);
        if (status != SUCCESS) return status;
        out[rank]->device = device_list ? device_list[rank] : rank;
    }
    return SUCCESS;
}

API int ncclCommSplit(Communicator *parent, int color, UNUSED int key, Communicator **out, UNUSED void *config) {
    *out = NULL;
    if (color < 0) return SUCCESS;
    int status = open_communicator(out, parent->ranks, parent->rank);
    if (status == SUCCESS) (*out)->split = true;
    return status;
}

API int ncclCommDestroy(Communicator *communicator) {
    free(communicator);
    return SUCCESS;
}

API int ncclCommAbort(Communicator *communicator) { return ncclCommDestroy(communicator); }

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

API const char *ncclGetErrorString(int status) { return status == SUCCESS ? "no error" : "invalid argument"; }

API const char *ncclGetLastError(UNUSED const Communicator *communicator) { return ""; }

API int ncclMemAlloc(void **out, size_t bytes) {
    return memory_allocate(current_device(), bytes, out) ? NCCL_SYSTEM_ERROR : SUCCESS;
}

API int ncclMemFree(void *address) { return memory_free(address) ? NCCL_INVALID_ARGUMENT : SUCCESS; }

static int copy(void *to, const void *from, size_t bytes) {
    if (to == from || bytes == 0) return SUCCESS;
    return copy_bytes(to, from, bytes) ? NCCL_INVALID_ARGUMENT : SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, UNUSED int operation,
                      UNUSED Communicator *communicator, UNUSED void *stream) {
    return copy(to, from, count * element_bytes(type));
}

API int ncclReduce(const void *from, void *to, size_t count, int type, UNUSED int operation, int root,
                   Communicator *communicator, UNUSED void *stream) {
    return root == communicator->rank ? copy(to, from, count * element_bytes(type)) : SUCCESS;
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, UNUSED int root,
                      UNUSED Communicator *communicator, UNUSED void *stream) {
    return copy(to, from, count * element_bytes(type));
}

API int ncclBcast(UNUSED void *data, UNUSED size_t count, UNUSED int type, UNUSED int root,
                  UNUSED Communicator *communicator, UNUSED void *stream) {
    return SUCCESS;
}

/* Each of n equal ranks contributes the same part. Where n is only an upper bound, no more is written than surely
 * belongs to the buffer: PyTorch rounds tensors up to 512 bytes. */
static int repeat(void *to, const void *from, size_t bytes, const Communicator *communicator) {
    enum { SURELY_THERE = 512 };
    int ranks = communicator->ranks, status = SUCCESS;
    if (communicator->split && bytes * (size_t)ranks > SURELY_THERE) ranks = 1;
    for (int rank = 0; rank < ranks && status == SUCCESS; rank++)
        status = copy((char *)to + (size_t)rank * bytes, from, bytes);
    return status;
}

/* Where this rank's part begins in what it sends to all. */
static const char *own_part(const void *from, size_t bytes, const Communicator *communicator) {
    return (const char *)from + (communicator->split ? 0 : (size_t)communicator->rank * bytes);
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator,
                      UNUSED void *stream) {
    return repeat(to, from, count * element_bytes(type), communicator);
}

API int ncclGather(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                   UNUSED void *stream) {
    return root == communicator->rank ? repeat(to, from, count * element_bytes(type), communicator) : SUCCESS;
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, UNUSED int operation,
                          Communicator *communicator, UNUSED void *stream) {
    size_t bytes = count * element_bytes(type);
    return copy(to, own_part(from, bytes, communicator), bytes);
}

/* This rank's part of what every equal rank sends. */
API int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *communicator,
                     UNUSED void *stream) {
    size_t bytes = count * element_bytes(type);
    return repeat(to, own_part(from, bytes, communicator), bytes, communicator);
}
