/* The pass itself: compiled once for each instruction set, whose file defines SET_NAME and SET. */

#include <float.h>
#include <math.h>
#include <string.h>

#include "decoder.h"

#ifdef _OPENMP
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#define THREAD omp_get_thread_num()
#define THREADS omp_get_num_threads()
#else
#define THREAD 0
#define THREADS 1
#endif

#include "vectors.h"
#include "products.h"
#include "attention.h"

/* x / sqrt(mean(x^2) + epsilon) * weight */
static void norm(const float *x, const float *weight, int size, float epsilon, float *y) {
    Lanes squares = all(0);
    int i = 0;
    for (; i + 16 <= size; i += 16) squares += load(x + i) * load(x + i);
    float sum = sum_of(squares);
    for (; i < size; i++) sum += x[i] * x[i];
    const float factor = 1 / sqrtf(sum / size + epsilon);
    for (i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

/* The first half of a head turned against the second, in place. */
static void rotate(float *x, const float *cos, const float *sin, int size) {
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i + half] + a * sin[i + half];
    }
}

/* up * gate / (1 + e^-gate), into up. */
static void gate_with(const float *gate, float *up, int count) {
    for (int i = 0; i < count; i += 16) {
        /* A part of a vector is computed as a whole one. */
        const int some = count - i;
        Lanes g = all(0), u = all(0);
        if (some >= 16) {
            g = load(gate + i), u = load(up + i);
        } else {
            memcpy(&g, gate + i, sizeof(float) * some);
            memcpy(&u, up + i, sizeof(float) * some);
        }
        /* By e^-|g|, which does not overflow. */
        const Ints negative = (Ints)g >> 31;
        const Lanes e = exponential((Lanes)((Ints)g | (int32_t)0x80000000));
        const Lanes plus = 1 / (1 + e), minus = plus * e;
        u *= g * (Lanes)(((Ints)minus & negative) | ((Ints)plus & ~negative));
        if (some >= 16)
            memcpy(up + i, &u, sizeof u);
        else
            memcpy(up + i, &u, sizeof(float) * some);
    }
}

/* --- the pass -------------------------------------------------------------------------------- */

/* Where the threads of a pass wait for each other, six times in every layer. They spin, for the
 * others are mostly near; but where another program has taken a CPU, one thread would spin as long as
 * the other is not let run, which OpenMP's own barrier does: it was seen to cost sixty times the
 * pass. So the CPU is offered to others in between. */
typedef struct {
#ifdef _OPENMP
    atomic_int arrived, round;
#else
    int unused;
#endif
} Meeting;

enum { SPINS = 1000 };

static void meet(Meeting *meeting, int threads) {
#ifdef _OPENMP
    if (threads == 1) return;
    const int round = atomic_load_explicit(&meeting->round, memory_order_acquire);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->round, round + 1, memory_order_release);
        return;
    }
    for (int i = 0; atomic_load_explicit(&meeting->round, memory_order_acquire) == round; i++) {
        if (i >= SPINS) {
            sched_yield();
            continue;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
#else
    (void)meeting;
    (void)threads;
#endif
}

typedef struct {
    float *q, *k, *v, *attended, *gate, *up;
    uintptr_t own; /* of the first thread; the others' follow */
    size_t own_bytes;
} Room;

typedef struct {
    Inputs in;
    float *normed, *scores;
} Own;

static int widest(const Decoder *d) {
    int width = d->hidden;
    const int others[] = {d->heads * d->head_size, d->intermediate, d->layer[0].q.inputs};
    for (int i = 0; i < 3; i++) width = others[i] > width ? others[i] : width;
    return width;
}

/* The next `bytes` of the scratch memory, in whole lines of the cache. */
static void *cut(uintptr_t *at, size_t bytes) {
    const uintptr_t here = *at;
    *at += (bytes + 63) / 64 * 64;
    return (void *)here;
}

static Inputs cut_inputs(uintptr_t *at, int rows, int size) {
    const size_t groups = (size_t)rows * groups_of(size);
    Inputs in;
    in.groups = cut(at, groups * sizeof(Group));
    in.scales = cut(at, groups * sizeof(float));
    in.totals = cut(at, groups * sizeof(float));
    in.zeros = cut(at, groups * sizeof(int32_t));
    in.plain = cut(at, groups * INPUTS * sizeof(float));
    in.halves = cut(at, groups * INPUTS * 2 * sizeof(uint16_t));
    in.count = groups_of(size);
    return in;
}

static Own cut_own(uintptr_t *at, const Decoder *d, int rows, int capacity) {
    Own own;
    own.in = cut_inputs(at, rows, widest(d));
    own.normed = cut(at, sizeof(float) * rows * widest(d));
    own.scores = cut(at, sizeof(float) * MOST_QUERIES * ((size_t)capacity + 16));
    return own;
}

static Room cut_room(uintptr_t *at, const Decoder *d, int rows, int threads, int capacity) {
    const size_t row = sizeof(float) * rows;
    Room room;
    room.q = cut(at, row * d->heads * d->head_size);
    room.k = cut(at, row * d->kv_heads * d->head_size);
    room.v = cut(at, row * d->kv_heads * d->head_size);
    room.attended = cut(at, row * d->heads * d->head_size);
    room.gate = cut(at, row * d->intermediate);
    room.up = cut(at, row * d->intermediate);
    room.own = *at;
    cut_own(at, d, rows, capacity);
    room.own_bytes = *at - room.own;
    *at = room.own + threads * room.own_bytes;
    return room;
}

/* A thread's share of a matrix's blocks of outputs. */
typedef struct {
    int from, to;
} Share;

static Share share_of(int outputs, int thread, int threads) {
    const int64_t blocks = blocks_of(outputs);
    const Share share = {(int)(blocks * thread / threads), (int)(blocks * (thread + 1) / threads)};
    return share;
}

/* A thread's share of a product, after which it multiplies by its share of another matrix. */
static void my_part(const Matrix *w, const Inputs *in, int rows, int thread, int threads, float *y,
                    int add, const Matrix *then) {
    const Share share = share_of(w->outputs, thread, threads);
    const uint8_t *next = w->weights;
    if (then->kind == BFLOAT16)
        next = then->weights + sizeof(uint16_t) * then->inputs * OUTPUTS *
                                   (size_t)share_of(then->outputs, thread, threads).from;
    multiply(w, in, rows, share.from, share.to, y, add, next);
}

static void norm_rows(const float *x, const float *weight, const Decoder *d, int rows, float *y) {
    for (int m = 0; m < rows; m++)
        norm(x + (size_t)m * d->hidden, weight, d->hidden, d->epsilon, y + (size_t)m * d->hidden);
}

/* Where a row's keys and values lie. */
typedef struct {
    int slot, position;
} Place;

INLINE Place place_of(const Pass *pass, int m) {
    const Place place = {(pass->first + m) / pass->width, (int)pass->positions[m]};
    return place;
}

/* A head's numbers turned by what belongs to their position. */
static void turn(float *x, const Pass *pass, Place place, int size) {
    const int last = pass->turns - 1;
    const size_t at = (size_t)(place.position < last ? place.position : last) * size;
    rotate(x, pass->cos + at, pass->sin + at, size);
}

static void embed(const Decoder *d, int64_t token, float *y) {
    const size_t from = (size_t)token * d->hidden;
    if (d->embedding_type == EMBEDDED_FLOAT32) {
        memcpy(y, (const float *)d->embedding + from, sizeof(float) * d->hidden);
        return;
    }
    const uint16_t *x = (const uint16_t *)d->embedding + from;
    for (int i = 0; i < d->hidden; i += 16) {
        /* A part of a vector is read as a whole one. */
        const int some = d->hidden - i < 16 ? d->hidden - i : 16;
        uint16_t narrow[16] = {0};
        memcpy(narrow, x + i, sizeof *x * some);
        const Wide wide = d->embedding_type == EMBEDDED_HALF
                              ? from_halves((const uint8_t *)narrow)
                              : from_bfloat16(narrow);
        memcpy(y + i, &wide, sizeof(float) * some);
    }
}

/* What a head's first layer is given, [rows, 2 * hidden]; the first thread begins the stream. */
static void join_rows(const Decoder *d, const Pass *pass, int thread, float *y) {
    const int hidden = d->hidden;
    for (int m = 0; m < pass->rows; m++, y += 2 * hidden) {
        const float *state = pass->states + (size_t)m * hidden;
        embed(d, pass->tokens[m], y);
        norm(y, d->token_norm, hidden, d->epsilon, y);
        norm(state, d->state_norm, hidden, d->epsilon, y + hidden);
        if (thread == 0)
            memcpy(pass->x + (size_t)m * hidden, d->residual_normed ? y + hidden : state,
                   sizeof(float) * hidden);
    }
}

/* The stream where it is wanted, as it is before layer `l`. */
static void show(const Pass *pass, int l, int hidden) {
    if (!pass->streams || !pass->streams[l]) return;
    for (int m = 0; m < pass->rows; m++)
        memcpy(pass->streams[l] + (size_t)m * pass->stream_width, pass->x + (size_t)m * hidden,
               sizeof(float) * hidden);
}

/* A thread's share of the queries of a layer, whose first slot is `slots`. They are counted through
 * a key's head after the other, so that those that read the same keys come together. */
static void attend_part(const Decoder *d, const Layer *layer, const Cache *cache, const Pass *pass,
                        const Room *room, size_t slots, int thread, int threads, float *scores) {
    const int rows = pass->rows, size = d->head_size, shared = d->heads / d->kv_heads;
    const int64_t all_queries = (int64_t)rows * d->heads;
    const int64_t end = all_queries * (thread + 1) / threads;
    Query query[QUERIES];
    int n = 0;
    size_t from = 0;
    for (int64_t i = all_queries * thread / threads; i < end; i++) {
        const int kv_head = (int)(i / (rows * shared)), of_head = (int)(i % (rows * shared));
        const int m = of_head / shared, head = kv_head * shared + of_head % shared;
        const Place place = place_of(pass, m);
        const size_t its = ((slots + place.slot) * d->kv_heads + kv_head) * cache->capacity * size;
        if (n == QUERIES || (n && its != from)) {
            attend(cache, n, query, from, size, d->attention_scale, scores);
            n = 0;
        }
        from = its;
        const size_t at = ((size_t)m * d->heads + head) * size;
        float *q = room->q + at;
        if (layer->q_norm) norm(q, layer->q_norm, size, d->epsilon, q);
        turn(q, pass, place, size);
        query[n++] = (Query){q, place.position + 1, room->attended + at};
    }
    if (n) attend(cache, n, query, from, size, d->attention_scale, scores);
}

static void pass_of(const Decoder *d, const Cache *cache, const Pass *pass, const Room *room,
                    Meeting *meeting, int thread, int threads) {
    const int rows = pass->rows, size = d->head_size, hidden = d->hidden;
    const size_t plane = (size_t)cache->capacity * size;
    uintptr_t at = room->own + thread * room->own_bytes;
    Own own = cut_own(&at, d, rows, cache->capacity);
    const int joins = pass->states != NULL;
    if (!joins) {
        for (int m = thread; m < rows; m += threads)
            embed(d, pass->tokens[m], pass->x + (size_t)m * hidden);
        meet(meeting, threads);
    }
    for (int l = 0; l < d->layers; l++) {
        const Layer *layer = &d->layer[l];
        const size_t slots = (size_t)l * cache->slots;
        if (l == 0 && joins)
            join_rows(d, pass, thread, own.normed);
        else
            norm_rows(pass->x, layer->input_norm, d, rows, own.normed);
        if (thread == 0) show(pass, l, hidden);
        const int forms = taken_by(&layer->q) | taken_by(&layer->k) | taken_by(&layer->v);
        take_rows(own.normed, rows, layer->q.inputs, forms, &own.in);
        my_part(&layer->q, &own.in, rows, thread, threads, room->q, 0, &layer->k);
        my_part(&layer->k, &own.in, rows, thread, threads, room->k, 0, &layer->v);
        my_part(&layer->v, &own.in, rows, thread, threads, room->v, 0, &layer->o);
        meet(meeting, threads);
        /* A head to a thread, for the keys of neighbouring positions share lines of the cache. */
        for (int head = thread; head < d->kv_heads; head += threads) {
            for (int m = 0; m < rows; m++) {
                const size_t at_row = ((size_t)m * d->kv_heads + head) * size;
                const Place place = place_of(pass, m);
                float *k = room->k + at_row;
                if (layer->k_norm) norm(k, layer->k_norm, size, d->epsilon, k);
                turn(k, pass, place, size);
                const size_t slot = slots + place.slot;
                keep(cache, (slot * d->kv_heads + head) * plane, place.position, size, k,
                     room->v + at_row);
            }
        }
        meet(meeting, threads);
        attend_part(d, layer, cache, pass, room, slots, thread, threads, own.scores);
        meet(meeting, threads);
        take_rows(room->attended, rows, d->heads * size, taken_by(&layer->o), &own.in);
        my_part(&layer->o, &own.in, rows, thread, threads, pass->x, 1, &layer->gate);
        meet(meeting, threads);
        norm_rows(pass->x, layer->post_norm, d, rows, own.normed);
        take_rows(own.normed, rows, hidden, taken_by(&layer->gate) | taken_by(&layer->up),
                  &own.in);
        my_part(&layer->gate, &own.in, rows, thread, threads, room->gate, 0, &layer->up);
        my_part(&layer->up, &own.in, rows, thread, threads, room->up, 0, &layer->down);
        /* Each thread has made both of what it now joins. */
        const Share share = share_of(d->intermediate, thread, threads);
        const int begin = share.from * OUTPUTS;
        const int end = share.to * OUTPUTS < d->intermediate ? share.to * OUTPUTS : d->intermediate;
        for (int m = 0; m < rows; m++) {
            const size_t row = (size_t)m * d->intermediate + begin;
            gate_with(room->gate + row, room->up + row, end - begin);
        }
        meet(meeting, threads);
        take_rows(room->up, rows, d->intermediate, taken_by(&layer->down), &own.in);
        my_part(&layer->down, &own.in, rows, thread, threads, pass->x, 1,
                l + 1 < d->layers ? &layer[1].q : &d->output);
        meet(meeting, threads);
    }
    if (thread == 0) show(pass, d->layers, hidden);
    if (!pass->normed && !pass->logits) return;
    norm_rows(pass->x, d->norm, d, rows, own.normed);
    if (pass->normed && thread == 0)
        memcpy(pass->normed, own.normed, sizeof(float) * rows * hidden);
    if (pass->logits) {
        take_rows(own.normed, rows, hidden, taken_by(&d->output), &own.in);
        my_part(&d->output, &own.in, rows, thread, threads, pass->logits, 0, &d->layer->q);
    }
}

static void pass_all(const Decoder *d, const Cache *cache, const Pass *pass) {
    uintptr_t at = (uintptr_t)pass->scratch;
    const Room room = cut_room(&at, d, pass->rows, pass->threads, cache->capacity);
    Meeting meeting = {0};
#pragma omp parallel num_threads(pass->threads)
    {
        Shapes before;
        borrow_tiles(&before);
        pass_of(d, cache, pass, &room, &meeting, THREAD, THREADS);
        return_tiles(&before);
    }
}

static void multiply_all(const Matrix *w, const float *x, const float *weight, float epsilon,
                         float *y, void *scratch, int32_t rows, int32_t threads) {
    uintptr_t at = (uintptr_t)scratch;
    Inputs in = cut_inputs(&at, rows, w->inputs);
    if (weight) {
        float *normed = cut(&at, sizeof(float) * rows * w->inputs);
        for (int m = 0; m < rows; m++)
            norm(x + (size_t)m * w->inputs, weight, w->inputs, epsilon,
                 normed + (size_t)m * w->inputs);
        x = normed;
    }
    take_rows(x, rows, w->inputs, taken_by(w), &in);
#pragma omp parallel num_threads(threads)
    {
        Shapes before;
        borrow_tiles(&before);
        my_part(w, &in, rows, THREAD, THREADS, y, 0, w);
        return_tiles(&before);
    }
}

const Set SET = {SET_NAME, pass_all, multiply_all};
