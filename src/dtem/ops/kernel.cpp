// Bipartite matching and merging on a CPU, in float32: `match` and `merge` of dtem.ops, without a similarity matrix in
// memory and without small operations. Plain C functions on contiguous arrays, called by kernel.py.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

constexpr int ROWS = 6;           // A tokens of one tile
constexpr int PANEL = 2 * LANES;  // B tokens of one tile

namespace {

const float NONE = -std::numeric_limits<float>::infinity();

float norm(const float* z, int64_t d) {
    Floats lanes = {};
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) {
        Floats part;
        __builtin_memcpy(&part, z + k, sizeof part);
        lanes += part * part;
    }
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    for (; k < d; k++) sum += z[k] * z[k];
    return std::max(std::sqrt(sum), 1e-12f);
}

// Up to PANEL B tokens, normalised, as (d, PANEL): those that are missing are zero.
void pack(const float* z, int64_t stride, int64_t count, int64_t d, float* out) {
    std::fill(out, out + d * PANEL, 0.0f);
    for (int64_t j = 0; j < count; j++) {
        const float* row = z + j * stride;
        const float scale = 1.0f / norm(row, d);
        for (int64_t k = 0; k < d; k++) out[k * PANEL + j] = row[k] * scale;
    }
}

// For ROWS A tokens, the largest product with a B token, and which it is. Ties go to the lower index.
void strongest(const float* const* rows, const float* packed, int64_t b_count, int64_t d, float* best, int32_t* partner) {
    Floats top[ROWS][2];
    Ints place[ROWS][2], lane;
    for (int l = 0; l < LANES; l++) lane[l] = l;
    for (int i = 0; i < ROWS; i++)
        for (int h = 0; h < 2; h++) top[i][h] = Floats{} + NONE, place[i][h] = Ints{};
    for (int64_t first = 0; first < b_count; first += PANEL) {
        const float* panel = packed + first * d;
        Floats sum[ROWS][2] = {};
        for (int64_t k = 0; k < d; k++) {
            Floats b0, b1;
            __builtin_memcpy(&b0, panel + k * PANEL, sizeof b0);
            __builtin_memcpy(&b1, panel + k * PANEL + LANES, sizeof b1);
            for (int i = 0; i < ROWS; i++) {
                const float a = rows[i][k];
                sum[i][0] += a * b0;
                sum[i][1] += a * b1;
            }
        }
        for (int h = 0; h < 2; h++) {
            const Ints index = lane + (int32_t)(first + h * LANES);
            const Ints exists = index < (int32_t)b_count;
            for (int i = 0; i < ROWS; i++) {
                const Ints better = (sum[i][h] > top[i][h]) & exists;
                top[i][h] = better ? sum[i][h] : top[i][h];
                place[i][h] = better ? index : place[i][h];
            }
        }
    }
    for (int i = 0; i < ROWS; i++) {  // without branches, which would be mispredicted
        const Ints second =
            (top[i][1] > top[i][0]) | ((top[i][1] == top[i][0]) & (place[i][1] < place[i][0]));
        const Floats values = second ? top[i][1] : top[i][0];
        const Ints indices = second ? place[i][1] : place[i][0];
        float value = NONE;
        for (int l = 0; l < LANES; l++) value = values[l] > value ? values[l] : value;
        int32_t index = std::numeric_limits<int32_t>::max();
        for (int l = 0; l < LANES; l++) index = std::min(index, values[l] == value ? indices[l] : index);
        best[i] = value, partner[i] = index;
    }
}

}  // namespace

extern "C" {

// z (batch, n, d) -> kept (batch, n - r), merged (batch, r), into (batch, r), as in ops.Matching.
void dtem_match(const float* z, int64_t batch, int64_t n, int64_t d, int64_t r, int64_t prefix, int64_t* kept,
                int64_t* merged, int64_t* into, int threads) {
    const int64_t a_first = prefix + prefix % 2, b_first = prefix + 1 - prefix % 2;
    const int64_t a_count = (n - a_first + 1) / 2, b_count = (n - b_first + 1) / 2, left = n - r;
    const int64_t panels = (b_count + PANEL - 1) / PANEL, blocks = (a_count + ROWS - 1) / ROWS;
    std::unique_ptr<float[]> packed(new float[batch * panels * PANEL * d]), best(new float[batch * blocks * ROWS]);
    std::unique_ptr<int32_t[]> partner(new int32_t[batch * blocks * ROWS]);
    if (batch * a_count * b_count * d < 200000) threads = 1;

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t task = 0; task < batch * panels; task++) {
            const int64_t image = task / panels, first = task % panels * PANEL;
            const float* start = z + (image * n + b_first + 2 * first) * d;
            pack(start, 2 * d, std::min<int64_t>(PANEL, b_count - first), d, packed.get() + task * PANEL * d);
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < batch * blocks; task++) {
            const int64_t image = task / blocks, first = task % blocks * ROWS;
            const float* rows[ROWS];
            for (int i = 0; i < ROWS; i++)
                rows[i] = z + (image * n + a_first + 2 * std::min<int64_t>(first + i, a_count - 1)) * d;
            float* values = best.get() + task * ROWS;
            strongest(rows, packed.get() + image * panels * PANEL * d, b_count, d, values, partner.get() + task * ROWS);
            for (int i = 0; i < ROWS; i++) {
                values[i] /= norm(rows[i], d);
                if (std::isnan(values[i])) values[i] = std::numeric_limits<float>::infinity();
            }
        }
#pragma omp for schedule(static)
        for (int64_t image = 0; image < batch; image++) {
            const float* values = best.get() + image * blocks * ROWS;
            const int32_t* partners = partner.get() + image * blocks * ROWS;
            int64_t *keep = kept + image * left, *merge = merged + image * r, *target = into + image * r;
            std::unique_ptr<int32_t[]> order(new int32_t[a_count]);
            std::iota(order.get(), order.get() + a_count, 0);
            auto stronger = [values](int32_t i, int32_t j) {
                return values[i] > values[j] || (values[i] == values[j] && i < j);
            };
            if (r > 0 && r < a_count)
                std::nth_element(order.get(), order.get() + r - 1, order.get() + a_count, stronger);
            std::sort(order.get(), order.get() + r, stronger);
            std::sort(order.get() + r, order.get() + a_count);
            for (int64_t i = 0; i < r; i++) {
                merge[i] = a_first + 2 * order[i];
                target[i] = left - b_count + partners[order[i]];
            }
            std::iota(keep, keep + prefix, 0);
            for (int64_t i = r; i < a_count; i++) keep[prefix + i - r] = a_first + 2 * order[i];
            for (int64_t j = 0; j < b_count; j++) keep[left - b_count + j] = b_first + 2 * j;
        }
    }
}

// x (batch, n, c), size (batch, n) or null (ones) -> out (batch, left, c), new_size (batch, left), as in ops.merge.
void dtem_merge(const float* x, const float* size, const int64_t* kept, const int64_t* merged, const int64_t* into,
                int64_t batch, int64_t left, int64_t r, int64_t c, float* out, float* new_size, int threads) {
    const int64_t n = left + r;
    // By output token the first of the merged ones that it receives (-1: none), by merged token the next one.
    std::unique_ptr<int32_t[]> first(new int32_t[batch * left]), next(new int32_t[batch * r]);
    if (batch * left * c < 50000) threads = 1;

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t image = 0; image < batch; image++) {
            const int64_t *keep = kept + image * left, *merge = merged + image * r, *target = into + image * r;
            const float* before = size ? size + image * n : nullptr;
            float* sizes = new_size + image * left;
            for (int64_t j = 0; j < left; j++) sizes[j] = before ? before[keep[j]] : 1.0f;
            for (int64_t i = 0; i < r; i++) sizes[target[i]] += before ? before[merge[i]] : 1.0f;
            std::fill_n(first.get() + image * left, left, -1);
            for (int64_t i = r - 1; i >= 0; i--) {
                int32_t& head = first[image * left + target[i]];
                next[image * r + i] = head, head = (int32_t)i;
            }
        }
        std::unique_ptr<float[]> change(new float[c]);
#pragma omp for schedule(static, 16)  // tokens that receive something are all among the last ones of an image
        for (int64_t row = 0; row < batch * left; row++) {
            const int64_t image = row / left;
            const float* old = x + (image * n + kept[row]) * c;
            float* to = out + row * c;
            std::copy_n(old, c, to);
            for (int64_t i = first[row]; i >= 0; i = next[image * r + i]) {
                const int64_t token = image * n + merged[image * r + i];
                const float share = (size ? size[token] : 1.0f) / new_size[row];
                const float* from = x + token * c;
                for (int64_t k = 0; k < c; k++) change[k] = (from[k] - old[k]) * share;
                asm volatile("" ::: "memory");  // product and sum are rounded one by one, as torch rounds them
                for (int64_t k = 0; k < c; k++) to[k] += change[k];
            }
        }
    }
}

// Both, for callers that need no matching: one call.
void dtem_match_and_merge(const float* z, const float* x, const float* size, int64_t batch, int64_t n, int64_t d,
                          int64_t c, int64_t r, int64_t prefix, float* out, float* new_size, int threads) {
    const int64_t left = n - r;
    std::unique_ptr<int64_t[]> indices(new int64_t[batch * (left + 2 * r)]);
    int64_t *kept = indices.get(), *merged = kept + batch * left, *into = merged + batch * r;
    dtem_match(z, batch, n, d, r, prefix, kept, merged, into, threads);
    dtem_merge(x, size, kept, merged, into, batch, left, r, c, out, new_size, threads);
}
}
