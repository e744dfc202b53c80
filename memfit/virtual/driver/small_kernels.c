/* The few kernels of PyTorch that are really run, on small values that are known.
 *
 * Host code reads some of what they compute: a gradient scaler's scale, a step counter, the length of an object that
 * another rank sent, a check that a learning rate is positive. They fill, compare, add, join and reduce tensors of
 * plain numbers that lie in one piece. Each is told by its mangled name, from which follow its arguments; one whose
 * inputs are not known is not run, and its result is then not known either. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vgpu.h"

enum { NONE, FILL, COMPARE, COMPARE_SCALAR, EQUAL, EQUAL_SCALAR, ADD, ADD_SCALAR, JOIN, SUM, GREATEST, LEAST, ALL, ANY };

enum { INTEGER, UNSIGNED, REAL, OPAQUE };

/* Types by their mangled names. */
static const struct {
    const char *name;
    unsigned char bytes, sort;
} types[] = {
    {"b", 1, UNSIGNED}, {"h", 1, UNSIGNED}, {"a", 1, INTEGER}, {"s", 2, INTEGER}, {"t", 2, UNSIGNED},
    {"i", 4, INTEGER}, {"j", 4, UNSIGNED}, {"l", 8, INTEGER}, {"m", 8, UNSIGNED}, {"f", 4, REAL}, {"d", 8, REAL},
    {"N3c104HalfE", 2, OPAQUE}, {"N3c108BFloat16E", 2, OPAQUE},
    {"NS1_10OpaqueTypeILj1EEE", 1, OPAQUE}, {"NS1_10OpaqueTypeILj2EEE", 2, OPAQUE},
    {"NS1_10OpaqueTypeILj4EEE", 4, OPAQUE}, {"NS1_10OpaqueTypeILj8EEE", 8, OPAQUE},
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
    if (type == TYPES || (types[type].sort == OPAQUE && !opaque)) return (SmallKernel){NONE, 0};
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

SmallKernel small_kernel(const char *name) {
    if (name == NULL) return (SmallKernel){NONE, 0};
    bool plain = strstr(name, "23TrivialOffsetCalculator") && strstr(name, "15LoadWithoutCast") &&
                 strstr(name, "16StoreWithoutCast");
    if (strstr(name, "29vectorized_elementwise_kernel") || (plain && strstr(name, "27unrolled_elementwise_kernel")))
        return elementwise(name);
    if (strstr(name, "CatArrayBatchedCopy")) return join(name);
    if (strstr(name, "13reduce_kernelILi512ELi1ENS0_8ReduceOpI")) return reduction(name);
    return (SmallKernel){NONE, 0};
}

/* A number of any type: whole numbers wrap as the card's do. */
typedef struct {
    bool real;
    int64_t whole;
    double value;
} Number;

static Number load(unsigned char type, const char *from) {
    Number number = {.real = types[type].sort == REAL};
    size_t bytes = types[type].bytes;
    if (number.real) {
        float narrow;
        if (bytes == sizeof narrow) {
            memcpy(&narrow, from, bytes);
            number.value = (double)narrow;
        } else {
            memcpy(&number.value, from, bytes);
        }
        return number;
    }
    memcpy(&number.whole, from, bytes); /* the low bytes come first */
    unsigned unused = 64 - 8 * (unsigned)bytes;
    if (types[type].sort == INTEGER && unused > 0)
        number.whole = (int64_t)((uint64_t)number.whole << unused) >> unused;
    return number;
}

static void store(unsigned char type, char *to, Number number) {
    size_t bytes = types[type].bytes;
    if (!number.real) {
        memcpy(to, &number.whole, bytes);
    } else if (bytes == sizeof(float)) {
        float narrow = (float)number.value;
        memcpy(to, &narrow, bytes);
    } else {
        memcpy(to, &number.value, bytes);
    }
}

/* a + b * c */
static Number add(Number a, Number b, Number c) {
    if (a.real) a.value += b.value * c.value;
    else a.whole = (int64_t)((uint64_t)a.whole + (uint64_t)b.whole * (uint64_t)c.whole);
    return a;
}

static bool less(unsigned char type, Number a, Number b) {
    if (a.real) return a.value < b.value;
    return types[type].sort == UNSIGNED ? (uint64_t)a.whole < (uint64_t)b.whole : a.whole < b.whole;
}

static bool same(Number a, Number b) { return a.real ? a.value == b.value : a.whole == b.whole; }

/* PyTorch's order of comparisons. */
static bool compare(unsigned char type, int operation, Number a, Number b) {
    enum { GREATER_EQUAL, GREATER, LESS_EQUAL, LESS };
    switch (operation) {
    case GREATER_EQUAL: return less(type, b, a) || same(a, b);
    case GREATER: return less(type, b, a);
    case LESS_EQUAL: return less(type, a, b) || same(a, b);
    case LESS: return less(type, a, b);
    default: return false;
    }
}

/* Whether an input is known; `age` becomes its age when it is older. */
static bool know(const char *input, size_t bytes, unsigned long *age) {
    unsigned long its;
    if (memory_device(input, bytes) < 0 || !values_age(input, bytes, &its)) return false;
    if (its < *age) *age = its;
    return true;
}

static bool run_elementwise(SmallKernel kernel, void **arguments) {
    unsigned char type = kernel.type;
    size_t size = types[type].bytes;
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

    unsigned long age = values_now();
    bool known = kernel.kind == FILL || know(data[1], count * size, &age);
    if (!known || (two && !know(data[2], count * size, &age))) {
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
    if (kernel.kind == COMPARE_SCALAR || kernel.kind == EQUAL_SCALAR) scalar = load(type, constant);
    if (kernel.kind == ADD_SCALAR) {
        scalar = load(type, what);
        alpha = load(type, what + size);
    }
    if (kernel.kind == ADD) alpha = load(type, what);
    for (size_t i = 0; i < count; i++) {
        Number a = load(type, data[1] + i * size), b = two ? load(type, data[2] + i * size) : scalar;
        char *to = data[0] + i * out_size;
        if (kernel.kind == COMPARE || kernel.kind == COMPARE_SCALAR) *to = compare(type, operation, a, b);
        else if (answers) *to = same(a, b) == (operation == 0);
        else store(type, to, add(a, b, alpha));
    }
    values_write_as_of(data[0], bytes, age);
    return true;
}

/* What a join is told of its inputs. */
typedef struct {
    const char *input[128];
    unsigned offset[128], length[128], elements[128];
} Parts;

static bool run_join(SmallKernel kernel, void **arguments, unsigned count) {
    size_t size = types[kernel.type].bytes, bytes = 0;
    const Parts *parts = arguments[1];
    char *to;
    memcpy(&to, arguments[0], sizeof to);
    if (count == 0 || count > 128) return false;
    unsigned long age = values_now();
    for (unsigned i = 0; i < count; i++) {
        bytes += parts->elements[i] * size;
        if (bytes > SMALL || !know(parts->input[i], parts->elements[i] * size, &age)) return false;
    }
    char *first = to + parts->offset[0] * size;
    if (memory_device(first, bytes) < 0) return false;
    for (unsigned i = 0; i < count; i++)
        memcpy(to + parts->offset[i] * size, parts->input[i], parts->elements[i] * size);
    values_write_as_of(first, bytes, age);
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
    unsigned char type = kernel.type;
    size_t size = types[type].bytes;
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
    unsigned long age = values_now();
    if (!in_one_piece || !know(from, (size_t)shape.inputs * size, &age)) {
        values_forget(to, size);
        return false;
    }
    Number result = load(type, from), one = {.real = result.real, .whole = 1, .value = 1};
    for (int i = 1; i < shape.inputs; i++) {
        Number next = load(type, from + (size_t)i * size);
        bool unordered = next.real && next.value != next.value;
        switch (kernel.kind) {
        case SUM: result = add(result, next, one); break;
        case GREATEST: if (unordered || less(type, result, next)) result = next; break;
        case LEAST: if (unordered || less(type, next, result)) result = next; break;
        case ALL: result.whole = result.whole && next.whole; break;
        default: result.whole = result.whole || next.whole;
        }
    }
    store(type, to, result);
    values_write_as_of(to, size, age);
    return true;
}

bool small_kernel_run(SmallKernel kernel, void **arguments, unsigned parts) {
    if (kernel.kind == JOIN) return run_join(kernel, arguments, parts);
    return kernel.kind >= SUM ? run_reduction(kernel, arguments) : run_elementwise(kernel, arguments);
}
