/* The few kernels of PyTorch that are really run, on small values that are known.
 *
 * Host code reads some of what they compute: a gradient scaler's scale, a step counter, the length of an object that
 * another rank sent, a check that a learning rate is positive. They fill, compare, add, join and reduce tensors of
 * plain numbers that lie in one piece. Each is told by its mangled name, from which follow its arguments; one whose
 * inputs are not known is not run, and its result is then not known either. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "numbers.h"
#include "vgpu.h"

enum { NONE, FILL, COMPARE, COMPARE_SCALAR, EQUAL, EQUAL_SCALAR, ADD, ADD_SCALAR, JOIN, SUM, GREATEST, LEAST, ALL, ANY,
       COUNT, SCALE };

/* Types by their mangled names. */
static const struct {
    const char *name;
    NumberType number;
} types[] = {
    {"b", {1, UNSIGNED}}, {"h", {1, UNSIGNED}}, {"a", {1, INTEGER}}, {"s", {2, INTEGER}}, {"t", {2, UNSIGNED}},
    {"i", {4, INTEGER}}, {"j", {4, UNSIGNED}}, {"l", {8, INTEGER}}, {"m", {8, UNSIGNED}}, {"f", {4, REAL}}, {"d", {8, REAL}},
    {"N3c104HalfE", {2, OPAQUE}}, {"N3c108BFloat16E", {2, OPAQUE}},
    {"NS1_10OpaqueTypeILj1EEE", {1, OPAQUE}}, {"NS1_10OpaqueTypeILj2EEE", {2, OPAQUE}},
    {"NS1_10OpaqueTypeILj4EEE", {4, OPAQUE}}, {"NS1_10OpaqueTypeILj8EEE", {8, OPAQUE}},
};
enum { TYPES = sizeof types / sizeof *types };

/* The type at the front of a mangled text, when `after` follows it; TYPES for none. */
static unsigned char type_at(const char *text, const char *after) {
    for (unsigned char i = 0; i < TYPES; i++) {
        size_t length = strlen(types[i].name);
        if (strncmp(text, types[i].name, length) == 0 && strncmp(text + length, after, strlen(after)) == 0) return i;
    }
    return TYPES;
}

static SmallKernel of_type(int kind, unsigned char type, bool opaque) {
    if (type == TYPES || (types[type].number.sort == OPAQUE && !opaque)) return (SmallKernel){NONE, 0};
    return (SmallKernel){(unsigned char)kind, type};
}

/* Elementwise kernels over contiguous tensors of one type: their first arguments are a number of elements, what they
 * do, and addresses. */
static SmallKernel elementwise(const char *name) {
    static const struct {
        const char *what, *within;
        int kind;
    } known[] = {
        {"11FillFunctorI", NULL, FILL},
        {"21compare_scalar_kernelI", NULL, COMPARE_SCALAR},
        {"14CompareFunctorI", NULL, COMPARE},
        {"21CUDAFunctorOnSelf_addI", NULL, ADD_SCALAR},
        {"15CUDAFunctor_addI", NULL, ADD},
        {"16CompareEqFunctorI", "13AUnaryFunctorI", EQUAL_SCALAR},
        {"16CompareEqFunctorI", "13BinaryFunctorI", EQUAL},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *at = strstr(name, known[i].what);
        if (at == NULL) continue;
        bool nested = strstr(name, "UnaryFunctorI") != NULL || strstr(name, "13BinaryFunctorI") != NULL;
        if (known[i].within == NULL ? nested : strstr(name, known[i].within) == NULL) continue;
        return of_type(known[i].kind, type_at(at + strlen(known[i].what), "E"), known[i].kind == FILL);
    }
    return (SmallKernel){NONE, 0};
}

/* Joins of one-dimensional tensors, up to 128 in one launch. */
static SmallKernel join(const char *name) {
    const char *at = strstr(name, "_contigI");
    return at ? of_type(JOIN, type_at(at + strlen("_contigI"), "jLi1ELi128ELi1E"), true) : (SmallKernel){NONE, 0};
}

/* Reductions to values of the type that is reduced. */
static SmallKernel reduction(const char *name) {
    static const struct {
        const char *what;
        int kind;
    } known[] = {{"11sum_functorI", SUM}, {"13MaxNanFunctorI", GREATEST}, {"13MinNanFunctorI", LEAST},
                 {"15and_kernel_cuda", ALL}, {"14or_kernel_cuda", ANY}};
    unsigned char type = type_at(strstr(name, "8ReduceOpI") + strlen("8ReduceOpI"), "NS0_14func_wrapper_tI");
    if (type == TYPES) return (SmallKernel){NONE, 0};
    char end[32];
    snprintf(end, sizeof end, "Ej%sLi4ELi4E", types[type].name);
    if (strstr(name, end) == NULL) return (SmallKernel){NONE, 0};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strstr(name, known[i].what) != NULL) return of_type(known[i].kind, type, false);
    return (SmallKernel){NONE, 0};
}

/* The count that nonzero(), boolean masks and masked_select() begin with. */
static SmallKernel count(const char *name) {
    const char *at = strstr(name, "9NonZeroOpI");
    return at ? of_type(COUNT, type_at(at + strlen("9NonZeroOpI"), "E"), false) : (SmallKernel){NONE, 0};
}

SmallKernel small_kernel(const char *name) {
    if (name == NULL) return (SmallKernel){NONE, 0};
    bool plain = strstr(name, "23TrivialOffsetCalculator") && strstr(name, "15LoadWithoutCast") &&
                 strstr(name, "16StoreWithoutCast");
    if (strstr(name, "29vectorized_elementwise_kernel") || (plain && strstr(name, "27unrolled_elementwise_kernel")))
        return elementwise(name);
    if (strstr(name, "28DeviceReduceSingleTileKernel")) return count(name);
    if (strstr(name, "28amp_update_scale_cuda_kernel"))
        return (SmallKernel){SCALE, 0};
    if (strstr(name, "CatArrayBatchedCopy")) return join(name);
    if (strstr(name, "13reduce_kernelILi512ELi1ENS0_8ReduceOpI")) return reduction(name);
    return (SmallKernel){NONE, 0};
}

/* PyTorch's order of comparisons. */
static bool compare(int operation, Number a, Number b) {
    enum { GREATER_EQUAL, GREATER, LESS_EQUAL, LESS };
    switch (operation) {
    case GREATER_EQUAL: return number_less(b, a) || number_same(a, b);
    case GREATER: return number_less(b, a);
    case LESS_EQUAL: return number_less(a, b) || number_same(a, b);
    case LESS: return number_less(a, b);
    default: return false;
    }
}

/* Whether an input is known; `certainty` becomes its own when that is less. */
static bool know(const char *input, size_t bytes, int *certainty) {
    int its = memory_device(input, bytes) < 0 ? VALUE_UNKNOWN : values_certainty(input, bytes);
    if (its > *certainty) *certainty = its;
    return its != VALUE_UNKNOWN;
}

static bool run_elementwise(SmallKernel kernel, void **arguments) {
    NumberType type = types[kernel.type].number;
    size_t size = type.bytes;
    bool answers = kernel.kind >= COMPARE && kernel.kind <= EQUAL_SCALAR; /* with a flag for each element */
    bool two = kernel.kind == COMPARE || kernel.kind == EQUAL || kernel.kind == ADD;
    int elements, operation = 0;
    char *data[3];
    const char *what = arguments[1];
    memcpy(&elements, arguments[0], sizeof elements);
    if (elements <= 0 || (size_t)elements * size > SMALL) return false;
    memcpy(data, arguments[2], kernel.kind == FILL ? sizeof *data : two ? sizeof data : 2 * sizeof *data);
    size_t count = (size_t)elements, out_size = answers ? 1 : size, bytes = count * out_size;
    if (memory_device(data[0], bytes) < 0) return false;

    int certainty = VALUE_CERTAIN;
    bool known = kernel.kind == FILL || know(data[1], count * size, &certainty);
    if (!known || (two && !know(data[2], count * size, &certainty))) {
        values_forget(data[0], bytes);
        return false;
    }
    if (kernel.kind == FILL) {
        for (size_t i = 0; i < count; i++) memcpy(data[0] + i * size, what, size);
        values_write(data[0], bytes);
        return true;
    }
    if (answers) memcpy(&operation, what, sizeof operation);
    const char *constant = what + (size > sizeof operation ? size : sizeof operation); /* after the operation */
    Number scalar = {0}, alpha = {0};
    if (kernel.kind == COMPARE_SCALAR || kernel.kind == EQUAL_SCALAR) scalar = number_load(type, constant);
    if (kernel.kind == ADD_SCALAR) {
        scalar = number_load(type, what);
        alpha = number_load(type, what + size);
    }
    if (kernel.kind == ADD) alpha = number_load(type, what);
    for (size_t i = 0; i < count; i++) {
        Number a = number_load(type, data[1] + i * size), b = two ? number_load(type, data[2] + i * size) : scalar;
        char *to = data[0] + i * out_size;
        if (kernel.kind == COMPARE || kernel.kind == COMPARE_SCALAR) *to = compare(operation, a, b);
        else if (answers) *to = number_same(a, b) == (operation == 0);
        else number_store(to, number_plus(a, number_times(b, alpha)));
    }
    values_write_like(data[0], bytes, certainty);
    return true;
}

/* What a join is told of its inputs. */
typedef struct {
    const char *input[128];
    unsigned offset[128], length[128], elements[128];
} Parts;

static bool run_join(SmallKernel kernel, void **arguments, unsigned count) {
    size_t size = types[kernel.type].number.bytes, bytes = 0;
    const Parts *parts = arguments[1];
    char *to;
    memcpy(&to, arguments[0], sizeof to);
    if (count == 0 || count > 128) return false;
    int certainty = VALUE_CERTAIN;
    for (unsigned i = 0; i < count; i++) {
        bytes += parts->elements[i] * size;
        if (bytes > SMALL || !know(parts->input[i], parts->elements[i] * size, &certainty)) return false;
    }
    char *first = to + parts->offset[0] * size;
    if (memory_device(first, bytes) < 0) return false;
    for (unsigned i = 0; i < count; i++)
        memcpy(to + parts->offset[i] * size, parts->input[i], parts->elements[i] * size);
    values_write_like(first, bytes, certainty);
    return true;
}

/* How a reduction walks through its input or its outputs. */
enum { MOST_DIMENSIONS = 25 };
typedef struct {
    int dimensions;
    struct {
        unsigned divisor, magic, shift;
    } sizes[MOST_DIMENSIONS];
} Walk;

typedef struct {
    int element_bytes, inputs, outputs, more[13];
} Shape;

static bool run_reduction(SmallKernel kernel, void **arguments) {
    NumberType type = types[kernel.type].number;
    size_t size = type.bytes;
    /* In order: what it does (nothing to store), the value to begin with, the shape, the two walks with one stride and
     * two strides for each dimension, the input, the outputs. */
    size_t at = 2 * size < sizeof(int) ? sizeof(int) : 2 * size;
    const char *argument = arguments[0];
    Shape shape;
    Walk walk;
    unsigned stride;
    const char *from;
    char *to;
    memcpy(&shape, argument + at, sizeof shape);
    at += sizeof shape;
    memcpy(&walk, argument + at, sizeof walk);
    memcpy(&stride, argument + at + sizeof walk, sizeof stride);
    at += 2 * sizeof walk + 3 * MOST_DIMENSIONS * sizeof stride;
    at = (at + sizeof from - 1) / sizeof from * sizeof from;
    memcpy(&from, argument + at, sizeof from);
    memcpy(&to, argument + at + sizeof from, sizeof to);

    if (shape.outputs != 1 || shape.inputs <= 0 || (size_t)shape.inputs * size > SMALL) return false;
    if (memory_device(to, size) < 0) return false;
    bool in_one_piece = walk.dimensions <= 1 && (shape.inputs == 1 || stride == size);
    int certainty = VALUE_CERTAIN;
    if (!in_one_piece || !know(from, (size_t)shape.inputs * size, &certainty)) {
        values_forget(to, size);
        return false;
    }
    Number result = number_load(type, from);
    for (int i = 1; i < shape.inputs; i++) {
        Number next = number_load(type, from + (size_t)i * size);
        switch (kernel.kind) {
        case SUM: result = number_plus(result, next); break;
        case GREATEST: result = number_pick(result, next, true); break;
        case LEAST: result = number_pick(result, next, false); break;
        case ALL: result.whole = result.whole && next.whole; break;
        default: result.whole = result.whole || next.whole;
        }
    }
    number_store(to, result);
    values_write_like(to, size, certainty);
    return true;
}

static bool run_count(SmallKernel kernel, void **arguments) {
    NumberType type = types[kernel.type].number;
    const char *input[2], *from; /* behind what is done to each element, or before it */
    char *to;
    int elements, found = 0, certainty = VALUE_CERTAIN;
    memcpy(input, arguments[0], sizeof input);
    from = memory_device(input[0], 1) >= 0 ? input[0] : input[1];
    memcpy(&to, arguments[1], sizeof to);
    memcpy(&elements, arguments[2], sizeof elements);
    if (elements <= 0 || (size_t)elements * type.bytes > SMALL || memory_device(to, sizeof found) < 0) return false;
    if (!know(from, (size_t)elements * type.bytes, &certainty)) {
        values_forget(to, sizeof found);
        return false;
    }
    Number zero = number_of(type, 0);
    for (int i = 0; i < elements; i++) found += !number_same(number_load(type, from + (size_t)i * type.bytes), zero);
    memcpy(to, &found, sizeof found);
    values_write_like(to, sizeof found, certainty);
    return true;
}

/* A gradient scaler's update. Whether any gradient overflowed is not known: none did. */
static bool run_scale(void **arguments) {
    float *scale;
    int *tracker, interval, certainty = VALUE_CERTAIN;
    double growth;
    memcpy(&scale, arguments[0], sizeof scale);
    memcpy(&tracker, arguments[1], sizeof tracker);
    memcpy(&growth, arguments[3], sizeof growth);
    memcpy(&interval, arguments[5], sizeof interval);
    if (!know((char *)scale, sizeof *scale, &certainty) || !know((char *)tracker, sizeof *tracker, &certainty))
        return false;
    float grown = (float)((double)*scale * growth);
    if (++*tracker == interval) {
        if (grown - grown == 0.0F) *scale = grown; /* finite */
        *tracker = 0;
    }
    values_write_like(scale, sizeof *scale, certainty);
    values_write_like(tracker, sizeof *tracker, certainty);
    return true;
}

bool small_kernel_run(SmallKernel kernel, void **arguments, unsigned parts) {
    if (kernel.kind == JOIN) return run_join(kernel, arguments, parts);
    if (kernel.kind == COUNT) return run_count(kernel, arguments);
    if (kernel.kind == SCALE) return run_scale(arguments);
    return kernel.kind >= SUM ? run_reduction(kernel, arguments) : run_elementwise(kernel, arguments);
}
