/* Numbers of any plain type, read from memory and written back. Whole numbers wrap as a card's do. */
#ifndef MEMFIT_NUMBERS_H
#define MEMFIT_NUMBERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { INTEGER, UNSIGNED, REAL, OPAQUE }; /* opaque ones are copied, never computed with */

typedef struct {
    unsigned char bytes, sort;
} NumberType;

typedef struct {
    NumberType type;
    int64_t whole;
    double value; /* of a real one */
} Number;

static inline Number number_load(NumberType type, const char *from) {
    Number number = {.type = type};
    if (type.sort == REAL && type.bytes == sizeof(float)) {
        float narrow;
        memcpy(&narrow, from, sizeof narrow);
        number.value = (double)narrow;
    } else if (type.sort == REAL) {
        memcpy(&number.value, from, sizeof number.value);
    } else {
        memcpy(&number.whole, from, type.bytes); /* the low bytes come first */
        unsigned unused = 64 - 8 * (unsigned)type.bytes;
        if (type.sort == INTEGER) number.whole = (int64_t)((uint64_t)number.whole << unused) >> unused;
    }
    return number;
}

static inline void number_store(char *to, Number number) {
    if (number.type.sort == REAL && number.type.bytes == sizeof(float)) {
        float narrow = (float)number.value;
        memcpy(to, &narrow, sizeof narrow);
    } else if (number.type.sort == REAL) {
        memcpy(to, &number.value, sizeof number.value);
    } else {
        memcpy(to, &number.whole, number.type.bytes);
    }
}

static inline Number number_of(NumberType type, int whole) {
    return (Number){.type = type, .whole = whole, .value = whole};
}

static inline Number number_times(Number a, Number b) {
    a.value *= b.value;
    a.whole = (int64_t)((uint64_t)a.whole * (uint64_t)b.whole);
    return a;
}

static inline Number number_plus(Number a, Number b) {
    a.value += b.value;
    a.whole = (int64_t)((uint64_t)a.whole + (uint64_t)b.whole);
    return a;
}

static inline bool number_less(Number a, Number b) {
    if (a.type.sort == REAL) return a.value < b.value;
    return a.type.sort == UNSIGNED ? (uint64_t)a.whole < (uint64_t)b.whole : a.whole < b.whole;
}

static inline bool number_same(Number a, Number b) {
    return a.type.sort == REAL ? a.value == b.value : a.whole == b.whole;
}

/* The greater or the lesser of two; an undefined one wins, as in PyTorch. */
static inline Number number_pick(Number a, Number b, bool greater) {
    bool undefined = b.type.sort == REAL && b.value != b.value;
    return undefined || (greater ? number_less(a, b) : number_less(b, a)) ? b : a;
}

#endif
