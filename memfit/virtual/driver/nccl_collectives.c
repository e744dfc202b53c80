/* NCCL: what the ranks of a communicator say to each other.
 *
 * Every operation is the same in kind: each rank sends a part to some of the others, and either places what it gets
 * or reduces it. Parts that are small are really passed on, with what is known of their values; larger ones are not,
 * and their values are unknown on arrival, as those of all large tensors are. Operations of a group are queued and
 * passed on together when it ends, so that one thread may speak for several ranks. */
#include <stdlib.h>
#include <string.h>

#include "nccl.h"
#include "numbers.h"
#include "vgpu.h"

enum { SUM, PRODUCT, GREATEST, LEAST, AVERAGE };
enum { EVERYBODY = -1 };

typedef struct Operation {
    Communicator *communicator;
    const char *from;
    char *to;
    size_t bytes;            /* of one part */
    int senders, receivers;  /* a rank, or everybody */
    bool own_parts;          /* each receiver gets a part of its own of what is sent */
    bool reduces;
    bool pair;               /* half of a message between two ranks, which may both be this one */
    int type, operation;     /* of what is reduced */
    char *parts;             /* what came, by rank: how certain it is, and the bytes */
    struct Operation *next;
} Operation;

static __thread int depth; /* of groups that were begun */
static __thread Operation *queue, **queue_end;

static NumberType number_type(int type) {
    static const NumberType types[] = {{1, INTEGER}, {1, UNSIGNED}, {4, INTEGER}, {4, UNSIGNED}, {8, INTEGER}, {8, UNSIGNED},
                                       {2, OPAQUE},  {4, REAL},     {8, REAL},    {2, OPAQUE},   {1, OPAQUE},  {1, OPAQUE}};
    bool known = type >= 0 && type < (int)(sizeof types / sizeof *types);
    return known ? types[type] : (NumberType){4, OPAQUE};
}

static bool takes_part(int who, int rank) { return who == EVERYBODY || who == rank; }

/* Where a part that came is kept: how certain it is, and then its bytes. */
static int *certainty_of(const Operation *o, int rank) {
    return (int *)(void *)(o->parts + (size_t)rank * (sizeof(int64_t) + (o->bytes + 7) / 8 * 8));
}

static char *bytes_of(const Operation *o, int rank) { return (char *)certainty_of(o, rank) + sizeof(int64_t); }

static const char *part_for(const Operation *o, int rank) { return o->from + (o->own_parts ? (size_t)rank * o->bytes : 0); }

/* Copies bytes that are to be sent, and says how certain they are. Of a buffer that is known in front, as one is that
 * was made larger for the longest of all ranks' objects, the rest is sent as zeros. */
static int copy_out(char *to, const char *from, size_t bytes) {
    size_t known = bytes;
    int certainty = VALUE_CERTAIN;
    if (from == NULL) return VALUE_UNKNOWN;
    if (memory_device(from, bytes) >= 0) { /* else host memory that the card may read */
        certainty = values_certainty(from, bytes);
        if (certainty == VALUE_UNKNOWN) known = values_prefix(from, bytes);
        if (certainty == VALUE_UNKNOWN && known > 0) certainty = VALUE_CHANGED;
    }
    if (certainty != VALUE_UNKNOWN) memcpy(to, from, known);
    return certainty;
}

/* Writes what is known into device memory, or notes that it is not. */
static void put(char *to, const char *from, size_t bytes, int certainty) {
    if (memory_device(to, bytes) < 0) return;
    if (certainty != VALUE_UNKNOWN) memmove(to, from, bytes);
    values_write_like(to, bytes, certainty);
}

static Number combine(int operation, Number a, Number b) {
    switch (operation) {
    case PRODUCT: return number_times(a, b);
    case GREATEST: return number_pick(a, b, true);
    case LEAST: return number_pick(a, b, false);
    default: return number_plus(a, b);
    }
}

/* Combines the parts of all ranks into the first one's place, and returns what is known of the result. */
static int reduce(const Operation *o) {
    NumberType type = number_type(o->type);
    int certainty = *certainty_of(o, 0), ranks = o->communicator->ranks;
    bool counts = !o->communicator->split || o->operation > PRODUCT; /* or it does not matter how many ranks there are */
    bool can = counts && o->operation >= SUM && o->operation <= AVERAGE && type.sort != OPAQUE;
    for (int rank = 1; rank < ranks; rank++)
        if (*certainty_of(o, rank) > certainty) certainty = *certainty_of(o, rank);
    if (certainty == VALUE_UNKNOWN || (ranks > 1 && !can)) return VALUE_UNKNOWN;
    for (size_t at = 0; ranks > 1 && at < o->bytes; at += type.bytes) {
        Number result = number_load(type, bytes_of(o, 0) + at);
        for (int rank = 1; rank < ranks; rank++)
            result = combine(o->operation, result, number_load(type, bytes_of(o, rank) + at));
        if (o->operation == AVERAGE) {
            result.value /= ranks;
            result.whole /= ranks;
        }
        number_store(bytes_of(o, 0) + at, result);
    }
    return certainty;
}

static void finish(const Operation *o) {
    const Communicator *c = o->communicator;
    if (!takes_part(o->receivers, c->rank)) return;
    if (o->reduces) {
        int certainty = reduce(o);
        put(o->to, bytes_of(o, 0), o->bytes, certainty);
    } else if (o->senders != EVERYBODY) {
        put(o->to, bytes_of(o, o->senders), o->bytes, *certainty_of(o, o->senders));
    } else {
        /* How many ranks a split communicator has is unknown: no more is written than surely belongs to the buffer,
         * since PyTorch rounds tensors up to 512 bytes. */
        int ranks = c->split && o->bytes * (size_t)c->ranks > 512 ? 1 : c->ranks;
        for (int rank = 0; rank < ranks; rank++)
            put(o->to + (size_t)rank * o->bytes, bytes_of(o, rank), o->bytes, *certainty_of(o, rank));
    }
}

/* Large parts stay where they are; what comes of them is unknown, as if a kernel had computed it. */
static void finish_large(const Operation *o) {
    const Communicator *c = o->communicator;
    values_kernel_ran(false);
    if (!takes_part(o->receivers, c->rank) || o->from == o->to) return;
    size_t parts = o->reduces || o->senders != EVERYBODY || c->split ? 1 : (size_t)c->ranks;
    if (memory_device(o->to, parts * o->bytes) >= 0) values_forget(o->to, parts * o->bytes);
}

/* Prepares the messages of an operation, and fills in what needs none; returns how many there are, or -1. */
static int prepare(Operation *o, Message *messages) {
    Communicator *c = o->communicator;
    int count = 0;
    size_t part_bytes = sizeof(int64_t) + (o->bytes + 7) / 8 * 8;
    bool sends = takes_part(o->senders, c->rank), receives = takes_part(o->receivers, c->rank);
    if (o->pair && c->room != NULL) { /* of a message to itself, each half does its own */
        sends = sends && o->from != NULL;
        receives = receives && o->to != NULL;
    }
    /* The parts that come, and then those that go. */
    o->parts = calloc(2 * (size_t)c->ranks, part_bytes);
    if (o->parts == NULL) return -1;
    for (int rank = 0; rank < c->ranks; rank++) {
        *certainty_of(o, rank) = VALUE_UNKNOWN;
        if (c->room == NULL || (rank == c->rank && !o->pair)) {
            /* A rank that is not there would send what this one does. */
            const char *part = o->from ? part_for(o, c->split ? 0 : c->rank) : NULL;
            if (sends || c->room == NULL) *certainty_of(o, rank) = copy_out(bytes_of(o, rank), part, o->bytes);
            continue;
        }
        char *going = bytes_of(o, c->ranks + rank);
        if (sends && takes_part(o->receivers, rank)) {
            int certainty = copy_out(going, o->from ? part_for(o, rank) : NULL, o->bytes);
            messages[count++] = (Message){c->room, rank, true, going, o->bytes, certainty, false};
        }
        if (receives && takes_part(o->senders, rank))
            messages[count++] = (Message){c->room, rank, false, bytes_of(o, rank), o->bytes, VALUE_UNKNOWN, false};
    }
    return count;
}

/* Where ranks cannot meet, a peer sends this rank what it sends to itself: all ranks are alike. */
static void find_sender(Operation *list, Operation *receiver) {
    for (Operation *o = list; o != NULL; o = o->next) {
        bool to_itself = o->pair && o->from != NULL && o->receivers == o->communicator->rank;
        if (to_itself && o->communicator == receiver->communicator && o->bytes == receiver->bytes) {
            receiver->from = o->from;
            return;
        }
    }
}

/* The communicator that all operations of a list use, or NULL. */
static Communicator *only_communicator(const Operation *list) {
    for (const Operation *o = list; o != NULL; o = o->next)
        if (o->communicator != list->communicator) return NULL;
    return list ? list->communicator : NULL;
}

/* Passes on what the operations of a list have to say, and lets go of the list. */
static int carry_out(Operation *list) {
    size_t most = 0, count = 0;
    for (Operation *o = list; o != NULL; o = o->next) most += 2 * (size_t)o->communicator->ranks;
    Message *messages = calloc(most + 1, sizeof *messages);
    int status = messages ? SUCCESS : NCCL_SYSTEM_ERROR;
    for (Operation *o = list; o != NULL && status == SUCCESS; o = o->next) {
        if (o->bytes > SMALL || o->bytes == 0) continue;
        if (o->pair && o->from == NULL && o->communicator->room == NULL) find_sender(list, o);
        int more = prepare(o, messages + count);
        if (more < 0) status = NCCL_SYSTEM_ERROR;
        else count += (size_t)more;
    }
    Communicator *only = only_communicator(list);
    if (only != NULL) pthread_mutex_lock(&only->lock);
    if (status == SUCCESS && !rooms_pass(messages, count)) status = NCCL_REMOTE_ERROR;
    if (only != NULL) pthread_mutex_unlock(&only->lock);
    for (Message *m = messages; status == SUCCESS && m < messages + count; m++)
        if (!m->sends) ((int *)m->bytes)[-2] = m->certainty; /* before the bytes of the part that came */
    for (Operation *next, *o = list; o != NULL; o = next) {
        next = o->next;
        if (status == SUCCESS && o->bytes > SMALL) finish_large(o);
        else if (status == SUCCESS && o->bytes > 0) finish(o);
        free(o->parts);
        free(o);
    }
    free(messages);
    return status;
}

API int ncclGroupStart(void) {
    depth++;
    return SUCCESS;
}

API int ncclGroupEnd(void) {
    if (depth == 0) return NCCL_INVALID_ARGUMENT;
    if (--depth > 0) return SUCCESS;
    Operation *list = queue;
    queue = NULL;
    return carry_out(list);
}

static int add(Operation what) {
    Operation *o = malloc(sizeof *o);
    if (o == NULL) return NCCL_SYSTEM_ERROR;
    *o = what;
    o->next = NULL;
    watchdog_collective_called();
    if (depth == 0) return carry_out(o);
    if (queue == NULL) queue_end = &queue;
    *queue_end = o;
    queue_end = &o->next;
    return SUCCESS;
}

int nccl_gather_bytes(Communicator *communicator, const void *own, void *all, size_t bytes) {
    Message *messages = calloc(2 * (size_t)communicator->ranks, sizeof *messages);
    size_t count = 0;
    if (messages == NULL) return NCCL_SYSTEM_ERROR;
    for (int rank = 0; rank < communicator->ranks; rank++) {
        char *place = (char *)all + (size_t)rank * bytes;
        memcpy(place, own, bytes);
        if (rank == communicator->rank) continue;
        char *mine = (char *)(uintptr_t)own;
        messages[count++] = (Message){communicator->room, rank, true, mine, bytes, VALUE_CERTAIN, false};
        messages[count++] = (Message){communicator->room, rank, false, place, bytes, VALUE_UNKNOWN, false};
    }
    bool passed = rooms_pass(messages, count);
    free(messages);
    return passed ? SUCCESS : NCCL_REMOTE_ERROR;
}

/* An operator that scales first: its results are not worked out. */
API int ncclRedOpCreatePreMulSum(int *operation, UNUSED void *scalar, UNUSED int type, UNUSED int where,
                                 UNUSED Communicator *communicator) {
    *operation = AVERAGE + 1;
    return SUCCESS;
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *communicator,
                      UNUSED void *stream) {
    size_t bytes = count * number_type(type).bytes;
    return add((Operation){.communicator = communicator, .from = from, .to = to, .bytes = bytes, .senders = EVERYBODY,
                           .receivers = EVERYBODY, .reduces = true, .type = type, .operation = operation});
}

API int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                   Communicator *communicator, UNUSED void *stream) {
    size_t bytes = count * number_type(type).bytes;
    return add((Operation){.communicator = communicator, .from = from, .to = to, .bytes = bytes, .senders = EVERYBODY,
                           .receivers = root, .reduces = true, .type = type, .operation = operation});
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                          Communicator *communicator, UNUSED void *stream) {
    size_t bytes = count * number_type(type).bytes;
    return add((Operation){.communicator = communicator, .from = from, .to = to, .bytes = bytes, .senders = EVERYBODY,
                           .receivers = EVERYBODY, .own_parts = true, .reduces = true, .type = type,
                           .operation = operation});
}

API int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                      UNUSED void *stream) {
    watchdog_wait();
    /* Where ranks cannot meet, the root is a copy of this rank. */
    const void *source = communicator->room == NULL && from == NULL ? to : from;
    return add((Operation){.communicator = communicator, .from = source, .to = to,
                           .bytes = count * number_type(type).bytes, .senders = root, .receivers = EVERYBODY});
}

API int ncclBcast(void *data, size_t count, int type, int root, Communicator *communicator, void *stream) {
    return ncclBroadcast(data, data, count, type, root, communicator, stream);
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator,
                      UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .from = from, .to = to,
                           .bytes = count * number_type(type).bytes, .senders = EVERYBODY, .receivers = EVERYBODY});
}

API int ncclGather(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                   UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .from = from, .to = to,
                           .bytes = count * number_type(type).bytes, .senders = EVERYBODY, .receivers = root});
}

API int ncclScatter(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                    UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .from = from, .to = to, .own_parts = true,
                           .bytes = count * number_type(type).bytes, .senders = root, .receivers = EVERYBODY});
}

API int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *communicator,
                     UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .from = from, .to = to, .own_parts = true,
                           .bytes = count * number_type(type).bytes, .senders = EVERYBODY, .receivers = EVERYBODY});
}

API int ncclSend(const void *from, size_t count, int type, int peer, Communicator *communicator,
                 UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .from = from, .bytes = count * number_type(type).bytes,
                           .senders = communicator->rank, .receivers = peer, .pair = true});
}

API int ncclRecv(void *to, size_t count, int type, int peer, Communicator *communicator, UNUSED void *stream) {
    return add((Operation){.communicator = communicator, .to = to, .bytes = count * number_type(type).bytes,
                           .senders = peer, .receivers = communicator->rank, .pair = true});
}
