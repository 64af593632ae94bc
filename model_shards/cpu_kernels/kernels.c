/* What a CPU computes between its matrix products, in float32: norms, rotation, SwiGLU's gate, paged attention.
 *
 * Owns no memory and calls nothing but libm. kernels.py says what each function is given; nothing is checked here. In
 * all of them `part` of `parts` threads does its share.
 *
 * Invariant: what belongs to one token is computed by one function that is never inlined, so with the same machine
 * code whatever else is in the batch, and in an order that depends on that token alone. So its bits do too.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

enum {
  LANES = 8,        /* floats in a vector; the compiler splits it where registers are narrower */
  TILE_KEYS = 32,   /* keys and values of 32 tokens fit into the nearest cache */
  TILE_ROWS = 64,   /* query rows (heads of tokens) that read a tile of keys while it is there */
  KEYS = 4,         /* keys whose products with two rows are in registers at once */
  SLICE = 4,        /* vectors of two results that stay in registers while all values of a tile are added */
};

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vector load(const float *from) { return *(const vector *)from; }
static inline void store(float *to, vector values) { *(vector *)to = values; }
static inline vector all(float value) { return (vector){0} + value; }

static inline vector choose(integers condition, vector then, vector otherwise) {
  return (vector)(((integers)then & condition) | ((integers)otherwise & ~condition));
}

static inline float sum(vector v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

#ifdef __x86_64__
#define IN_REGISTER(v) __asm__("" : "+x"(v)) /* gcc would load it again for each use */
#else
#define IN_REGISTER(v) (void)(v)
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (integers){__VA_ARGS__})
#endif

/* The sums of four vectors and of four others, in that order: all at once, for the price of about three. */
static inline vector sums_of(const vector *v, const vector *w) {
  vector pairs[4], fours[2];
  for (int i = 0; i < 4; i++) {
    vector a = i < 2 ? v[2 * i] : w[2 * i - 4], b = i < 2 ? v[2 * i + 1] : w[2 * i - 3];
    pairs[i] = SHUFFLE(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; i++) {
    vector a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  vector a = fours[0], b = fours[1];
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

/* e to the x: 2 to the n times a polynomial of the rest, |rest| <= ln(2) / 2 (Cody and Waite's reduction, the
 * polynomial of Cephes' expf). Within 2 ulp from -87 on, which stands for what is below; infinite above 88. NaN
 * stays NaN. */
static inline vector exponential(vector x) {
  const float round = 12582912.0f; /* 1.5 * 2^23: added, it leaves an integer in the lowest bits */
  x = choose(x < all(-87.0f), all(-87.0f), x);
  integers huge = x > all(88.0f);
  x = choose(huge, all(88.0f), x);
  vector shifted = x * 1.44269504089f + round;
  vector n = shifted - round;
  vector rest = x - n * 0.693359375f + n * 2.12194440e-4f;
  vector p = all(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * (rest * rest) + rest + 1.0f;
  integers exponent = (integers)shifted - (integers)all(round) + 127;
  return choose(huge, all(INFINITY), p * (vector)(exponent << 23));
}

static __attribute__((noinline)) void norm_row(float *out, const float *row, const float *weight, int64_t size,
                                               float epsilon) {
  vector squares = all(0.0f), more = all(0.0f);
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    vector a = load(row + i), b = load(row + i + LANES);
    squares += a * a;
    more += b * b;
  }
  float total = sum(squares + more);
  for (int64_t j = i; j < size; j++) total += row[j] * row[j];
  float scale = 1.0f / sqrtf(total / (float)size + epsilon);
  for (i = 0; i + LANES <= size; i += LANES) store(out + i, load(row + i) * scale * load(weight + i));
  for (; i < size; i++) out[i] = row[i] * scale * weight[i];
}

void rms_norm(float *out, const float *rows, const float *weight, int64_t count, int64_t size, float epsilon,
              int64_t part, int64_t parts) {
  for (int64_t row = count * part / parts; row < count * (part + 1) / parts; row++)
    norm_row(out + row * size, rows + row * size, weight, size, epsilon);
}

void add_rms_norm(float *out, float *total, const float *update, const float *residual, const float *weight,
                  int64_t count, int64_t size, float epsilon, int64_t part, int64_t parts) {
  for (int64_t row = count * part / parts; row < count * (part + 1) / parts; row++) {
    float *to = total + row * size;
    const float *a = update + row * size, *b = residual + row * size;
    for (int64_t i = 0; i < size; i++) to[i] = a[i] + b[i];
    norm_row(out + row * size, to, weight, size, epsilon);
  }
}

static __attribute__((noinline)) void silu_row(float *out, const float *gate, const float *up, int64_t columns) {
  int64_t i = 0;
  for (; i + LANES <= columns; i += LANES) {
    vector g = load(gate + i);
    store(out + i, g / (exponential(-g) + 1.0f) * load(up + i));
  }
  if (i < columns) { /* the rest as a vector of its own, so that every column is computed alike */
    float g[LANES] = {0}, u[LANES] = {0}, o[LANES];
    memcpy(g, gate + i, (columns - i) * sizeof(float));
    memcpy(u, up + i, (columns - i) * sizeof(float));
    store(o, load(g) / (exponential(-load(g)) + 1.0f) * load(u));
    memcpy(out + i, o, (columns - i) * sizeof(float));
  }
}

void silu_and_multiply(float *out, const float *gate_up, int64_t count, int64_t columns, int64_t part,
                       int64_t parts) {
  for (int64_t row = count * part / parts; row < count * (part + 1) / parts; row++) {
    const float *gate = gate_up + row * 2 * columns;
    silu_row(out + row * columns, gate, gate + columns, columns);
  }
}

static __attribute__((noinline)) void rotate_head(float *restrict out, const float *restrict head,
                                                  const float *restrict cosine, const float *restrict sine,
                                                  int64_t dim) {
  int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i++) {
    float a = head[i], b = head[half + i];
    out[i] = a * cosine[i] + b * sine[i];
    out[half + i] = b * cosine[half + i] + a * sine[half + i];
  }
}

/* `cosine` and `sine` are NULL where nothing is rotated. */
void rotate_and_store(float *rotated, const float *heads, int64_t heads_stride, const float *value,
                      int64_t value_stride, const float *cosine, const float *sine, float *cache,
                      const int64_t *key_places, const int64_t *value_places, int64_t tokens, int64_t num_heads,
                      int64_t num_kv_heads, int64_t dim, int64_t part, int64_t parts) {
  int64_t num_query_heads = num_heads - num_kv_heads;
  for (int64_t token = tokens * part / parts; token < tokens * (part + 1) / parts; token++) {
    for (int64_t head = 0; head < num_heads; head++) {
      const float *from = heads + token * heads_stride + head * dim;
      float *to = rotated + (token * num_heads + head) * dim;
      if (cosine)
        rotate_head(to, from, cosine + token * dim, sine + token * dim, dim);
      else
        memcpy(to, from, dim * sizeof(float));
    }
    for (int64_t head = 0; head < num_kv_heads; head++) {
      int64_t place = token * num_kv_heads + head;
      memcpy(cache + key_places[place] * dim, rotated + (token * num_heads + num_query_heads + head) * dim,
             dim * sizeof(float));
      memcpy(cache + value_places[place] * dim, value + token * value_stride + head * dim, dim * sizeof(float));
    }
  }
}

/* One row of online softmax (Milakov and Gimelshein, 2018): its result so far, greatest score and sum of weights.
 * Of a tile it sees the keys [first, stop). */
typedef struct {
  const float *query;
  float *out;
  float greatest, weights;
  int first, stop;
} softmax_row;

/* From the scores of `count` keys to their weights, relative to the greatest so far; 0 for keys that the row does
 * not see. Returns by how much earlier weights shrink. */
static inline float weigh(softmax_row *row, float *scores, int count) {
  float greatest = row->greatest;
  for (int key = 0; key < row->first && key < count; key++) scores[key] = -INFINITY;
  for (int key = row->stop; key < count; key++) scores[key] = -INFINITY;
  vector most = load(scores), weights = all(0.0f);
  for (int key = LANES; key < count; key += LANES) {
    vector here = load(scores + key);
    most = choose(here > most, here, most);
  }
  for (int i = 0; i < LANES; i++) greatest = most[i] > greatest ? most[i] : greatest;
  for (int key = 0; key < count; key += LANES) {
    vector weight = exponential(load(scores + key) - greatest);
    weight = choose(load(scores + key) == all(-INFINITY), all(0.0f), weight);
    store(scores + key, weight);
    weights += weight;
  }
  /* 0 at the first tile; nothing to shrink where the row has seen nothing yet */
  const float keep = greatest == row->greatest ? 1.0f : expf(row->greatest - greatest);
  row->weights = row->weights * keep + sum(weights);
  row->greatest = greatest;
  return keep;
}

/* Adds some vectors of the values of `count` keys, weighted, to a part of two results. */
static inline void add_values(float *out, float *other, const float **values, const float *weights,
                              const float *other_weights, int count, float keep, float other_keep, int64_t offset,
                              const int slice) {
  vector sums[SLICE], others[SLICE];
  for (int i = 0; i < slice; i++) {
    sums[i] = load(out + offset + i * LANES) * keep;
    others[i] = load(other + offset + i * LANES) * other_keep;
  }
  for (int key = 0; key < count; key++)
    for (int i = 0; i < slice; i++) {
      vector value = load(values[key] + offset + i * LANES);
      IN_REGISTER(value);
      sums[i] += weights[key] * value;
      others[i] += other_weights[key] * value;
    }
  for (int i = 0; i < slice; i++) {
    store(out + offset + i * LANES, sums[i]);
    store(other + offset + i * LANES, others[i]);
  }
}

/* Two rows over the first `count` keys of a tile, a multiple of LANES: together they read keys and values once. */
static __attribute__((noinline)) void attend_rows(softmax_row *row, softmax_row *other, const float **keys,
                                                  const float **values, int count, int64_t dim, float scale) {
  float scores[TILE_KEYS], other_scores[TILE_KEYS];
  for (int key = 0; key < count; key += KEYS) {
    vector sums[KEYS], others[KEYS];
    for (int i = 0; i < KEYS; i++) sums[i] = others[i] = all(0.0f);
    for (int64_t d = 0; d < dim; d += LANES) {
      vector query = load(row->query + d), other_query = load(other->query + d);
      for (int i = 0; i < KEYS; i++) {
        vector k = load(keys[key + i] + d);
        IN_REGISTER(k);
        sums[i] += query * k;
        others[i] += other_query * k;
      }
    }
    vector both = sums_of(sums, others) * scale;
    memcpy(scores + key, &both, KEYS * sizeof(float));
    memcpy(other_scores + key, (const float *)&both + KEYS, KEYS * sizeof(float));
  }
  const float keep = weigh(row, scores, count), other_keep = weigh(other, other_scores, count);
  int64_t d = 0;
  for (; d + SLICE * LANES <= dim; d += SLICE * LANES)
    add_values(row->out, other->out, values, scores, other_scores, count, keep, other_keep, d, SLICE);
  for (; d < dim; d += LANES)
    add_values(row->out, other->out, values, scores, other_scores, count, keep, other_keep, d, 1);
}

static __attribute__((noinline)) void scale_row(float *row, float by, int64_t dim) {
  for (int64_t i = 0; i < dim; i++) row[i] *= by;
}

typedef struct {
  float *out;         /* [tokens, query heads, dim] */
  const float *query; /* [tokens, query heads, dim], a token `query_stride` after the one before */
  int64_t query_stride;
  const float *cache; /* [keys and values, KV heads, places, dim] */
  int64_t places, block_size, num_query_heads, num_kv_heads, dim;
  int64_t window; /* 0 where a token sees all keys up to its own */
  float scale;
} attention;

typedef struct {
  const int64_t *blocks;
  int64_t row;     /* of its first query token */
  int64_t count;   /* query tokens, the last of its context */
  int64_t context; /* tokens in the cache */
} sequence;

/* Where the keys and values of one tile lie. Beyond the context they stand for its last, which nobody sees. */
static void find_tile(const float **keys, const float **values, const attention *a, const sequence *s,
                      int64_t kv_head, int64_t origin) {
  const float *key_cache = a->cache + kv_head * a->places * a->dim;
  const float *value_cache = key_cache + a->num_kv_heads * a->places * a->dim;
  int64_t place = origin;
  for (int key = 0; key < TILE_KEYS;) {
    int64_t inside = place % a->block_size, left = a->block_size - inside;
    int64_t row = s->blocks[place / a->block_size] * a->block_size + inside;
    if (left > s->context - place) left = s->context - place;
    for (int64_t i = 0; i < left && key < TILE_KEYS; i++, key++) {
      keys[key] = key_cache + (row + i) * a->dim;
      values[key] = value_cache + (row + i) * a->dim;
    }
    place = place + left < s->context ? place + left : s->context - 1;
  }
}

/* Up to TILE_ROWS rows of a sequence and the query heads of one KV head. A row is a query head of a token; those of
 * a token follow each other. Rows go in pairs; an odd one is a pair with itself, to the same place, since a row alone
 * would need machine code of its own. A pair's keys are those that either sees: for the other their weights are 0, which changes
 * nothing. */
static void attend_tile(const attention *a, const sequence *s, int64_t kv_head, int64_t start) {
  const float *keys[TILE_KEYS], *values[TILE_KEYS];
  softmax_row rows[TILE_ROWS];
  int64_t positions[TILE_ROWS];
  const int64_t group = a->num_query_heads / a->num_kv_heads, left = s->count * group - start;
  const int count = (int)(left < TILE_ROWS ? left : TILE_ROWS), even = count + count % 2;
  for (int i = 0; i < even; i++) {
    const int64_t at = start + (i < count ? i : i - 1), token = s->row + at / group;
    const int64_t head = kv_head * group + at % group;
    float *out = a->out + (token * a->num_query_heads + head) * a->dim;
    rows[i] = (softmax_row){a->query + token * a->query_stride + head * a->dim, out, -INFINITY, 0.0f, 0, 0};
    positions[i] = s->context - s->count + at / group;
    memset(out, 0, (size_t)a->dim * sizeof(float));
  }
  const int64_t earliest = a->window && positions[0] >= a->window ? positions[0] + 1 - a->window : 0;
  for (int64_t origin = earliest / TILE_KEYS * TILE_KEYS; origin <= positions[count - 1]; origin += TILE_KEYS) {
    find_tile(keys, values, a, s, kv_head, origin);
    for (int i = 0; i < even; i++) {
      const int64_t stop = positions[i] + 1 - origin, first = a->window ? stop - a->window : 0;
      rows[i].stop = stop < 0 ? 0 : stop < TILE_KEYS ? (int)stop : TILE_KEYS;
      rows[i].first = first < 0 ? 0 : first < TILE_KEYS ? (int)first : TILE_KEYS;
    }
    for (int i = 0; i < even; i += 2) {
      const int stop = rows[i + 1].stop; /* of the later token */
      if (rows[i].first < stop)
        attend_rows(&rows[i], &rows[i + 1], keys, values, (stop + LANES - 1) / LANES * LANES, a->dim, a->scale);
    }
  }
  for (int i = 0; i < count; i++) scale_row(rows[i].out, 1.0f / rows[i].weights, a->dim);
}

/* `queries` has row, count and context of each sequence, `tables` its blocks. */
void attend(const attention *a, const int64_t *queries, const int64_t *tables, int64_t table_width,
            int64_t num_sequences, int64_t part, int64_t parts) {
  int64_t unit = 0;
  for (int64_t i = 0; i < num_sequences; i++) {
    const sequence s = {tables + i * table_width, queries[3 * i], queries[3 * i + 1], queries[3 * i + 2]};
    for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++)
      for (int64_t start = 0; start < s.count * (a->num_query_heads / a->num_kv_heads); start += TILE_ROWS)
        if (unit++ % parts == part) attend_tile(a, &s, kv_head, start);
  }
}
