/* For any CPU. */

#if defined(__GNUC__) && !defined(__clang__)
/* Vectors that the CPU lacks become hundreds of instructions, which nothing is gained by unrolling
 * and which would take most of the package's time to install. */
#pragma GCC optimize("O2")
#endif

#define SET_NAME "generic"
#define SET mtplx_generic
#include "decoder_body.h"

size_t mtplx_room(const Decoder *d, int32_t rows, int32_t threads, int32_t capacity) {
    uintptr_t at = 0;
    cut_room(&at, d, rows, threads, capacity);
    return at;
}

size_t mtplx_room_to_multiply(int32_t rows, int32_t inputs) {
    uintptr_t at = 0;
    cut_inputs(&at, rows, inputs);
    cut(&at, sizeof(float) * rows * inputs);
    return at;
}
