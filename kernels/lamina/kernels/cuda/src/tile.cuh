// A warp's share of attention on tensor cores, for caches of 16 or 8 bits: KV_TYPE (1 f16, 2 bf16, 3 q8), KEY_DIM,
// VALUE_DIM.
//
// A warp holds 16 queries (see attention.cuh): Q as A fragments, the scores of a page as D fragments, which are the A
// fragments of P V as they stand, and the output.
#include "attention.cuh"

constexpr int KEY_WIDTH = key_width(KEY_DIM), VALUE_WIDTH = value_width(VALUE_DIM);
constexpr int KEY_CHUNKS = KEY_WIDTH / 32, VALUE_TILES = VALUE_WIDTH / 8;
constexpr int KEY_PAGE_BYTES = page_bytes(KV_TYPE, KEY_WIDTH), VALUE_PAGE_BYTES = page_bytes(KV_TYPE, VALUE_WIDTH);

DEVICE u32 pack(float low, float high) { return KV_TYPE == KV_BF16 ? pack_bf16s(low, high) : pack_halves(low, high); }

DEVICE void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if (KV_TYPE == KV_BF16) {
        mma_bf16s(d, a, b0, b1);
    } else {
        mma_halves(d, a, b0, b1);
    }
}

// A lane's share of a B fragment as it lies in a page: eight numbers of 16 bits, or eight codes and their scales.
template <int TYPE>
struct Fragment {
    uint4 numbers;

    DEVICE void load_key(const u8* page, int c, int j, int lane) {
        numbers = *reinterpret_cast<const uint4*>(page + ((c * 2 + j) * 32 + lane) * 16);
    }
    DEVICE void load_value(const u8* page, int c, int lane) {
        numbers = *reinterpret_cast<const uint4*>(page + (c * 32 + lane) * 16);
    }
    DEVICE uint4 get() const { return numbers; }
};

template <>
struct Fragment<KV_Q8> {
    uint2 codes, scales;  // the scales of codes 0, 1 and 4, 5, and of codes 2, 3 and 6, 7

    DEVICE void load_key(const u8* page, int c, int j, int lane) {
        codes = *reinterpret_cast<const uint2*>(page + ((c * 2 + j) * 32 + lane) * 8);
        const int g = lane / 4, token = g / 2 * 4 + 2 * j + g % 2;
        const u32 scale = *reinterpret_cast<const u16*>(page + scale_offset(KEY_WIDTH, token, 32 * c));
        scales = make_uint2(scale | scale << 16, scale | scale << 16);
    }
    DEVICE void load_value(const u8* page, int c, int lane) {
        codes = *reinterpret_cast<const uint2*>(page + (c * 32 + lane) * 8);
        scales = *reinterpret_cast<const uint2*>(page + scale_offset(VALUE_WIDTH, lane % 4 * 4, 16 * c));
    }
    DEVICE uint4 get() const {
        const uint2 first = bytes_to_halves(codes.x), second = bytes_to_halves(codes.y);
        uint4 numbers;
        numbers.x = multiply_halves(first.x, scales.x);
        numbers.y = multiply_halves(first.y, scales.y);
        numbers.z = multiply_halves(second.x, scales.x);
        numbers.w = multiply_halves(second.y, scales.y);
        return numbers;
    }
};

// Sixteen queries as numbers of 16 bits, for A fragments; rows are 16 bytes more than KEY_WIDTH apart, so that the
// eight rows of a fragment lie in different banks.
struct Queries {
    uint4 eights[16][KEY_WIDTH / 8 + 1];

    // `count` queries from first_query on of KV head `head`; each of num_threads threads does its share, UNROLL quads
    // of a query at a time. Those beyond `count` stay as they are: nobody looks at what comes of them.
    template <int UNROLL>
    DEVICE void load(const Attention& p, int first_row, int first_query, int count, int head, int thread,
                     int num_threads) {
        constexpr int QUADS = KEY_WIDTH / 4;
        const float scale = query_scale(p);
#pragma unroll UNROLL
        for (int at = thread; at < count * QUADS; at += num_threads) {
            const int local = at / QUADS, quad = at % QUADS, m = first_query + local;
            const int row = first_row + m / p.group, query_head = head * p.group + m % p.group;
            const float* from = p.q + static_cast<size_t>(row) * p.q_stride + query_head * KEY_DIM;
            const float4 x = load_quad(from, quad, KEY_DIM);
            reinterpret_cast<uint2*>(eights[local])[quad] =
                make_uint2(pack(scale * x.x, scale * x.y), pack(scale * x.z, scale * x.w));
        }
    }
};

struct Tile {
    u32 q[KEY_CHUNKS][2][4];
    float o[VALUE_TILES][4];
    float highest[2], total[2];  // rows g and g + 8; total: this lane's share
    int position[2];             // -1: no such query
    int first_position, last_position;  // of all sixteen

    // Positions of queries first_query .. + 15 of `queries`; first_row is the sequence's. Step inputs only.
    DEVICE void start(const Attention& p, int first_row, int first_query, int queries, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = first_query + lane / 4 + 8 * h;
            position[h] = m < queries ? p.positions[first_row + m / p.group] : -1;
            highest[h] = NEGATIVE_INFINITY;
            total[h] = 0.f;
        }
        first_position = p.positions[first_row + min(first_query, queries - 1) / p.group];
        last_position = p.positions[first_row + min(first_query + 15, queries - 1) / p.group];
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++)
            for (int j = 0; j < 4; j++) o[i][j] = 0.f;
    }
    // Whether every query sees all keys of `count` pages from first_key on.
    DEVICE bool sees_all(const Attention& p, int first_key, int count) const {
        const bool is_near = p.window <= 0 || last_position - first_key < p.window;
        return is_near && first_key + count * PAGE_TOKENS <= first_position + 1;
    }
    DEVICE void load(const Queries& from, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {  // eight dimensions 32 c + 8 t ..
                const uint4 x = from.eights[g + 8 * h][4 * c + t];
                q[c][0][h] = x.x;
                q[c][0][h + 2] = x.y;
                q[c][1][h] = x.z;
                q[c][1][h + 2] = x.w;
            }
        }
    }

    // Scores of one page; fragment(c, j) gives the keys of dimensions 32 c .. and tile j.
    template <class Fragments>
    DEVICE void score(const Fragments& fragment, float (&s)[2][4]) const {
#pragma unroll
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < 4; i++) s[j][i] = 0.f;
#pragma unroll
        for (int c = 0; c < KEY_CHUNKS; c++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 b = fragment(c, j);
                mma(s[j], q[c][0], b.x, b.y);
                mma(s[j], q[c][1], b.z, b.w);
            }
        }
    }

    DEVICE static void cap(const Attention& p, float (&s)[2][4]) {
        if (p.softcap <= 0.f) return;
#pragma unroll
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < 4; i++) s[j][i] = capped(p, s[j][i]);
    }
    // The page's first key is at position first_key.
    DEVICE void mask(const Attention& p, int first_key, int lane, float (&s)[2][4]) const {
        const int t = lane % 4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + 4 * t + 2 * j + i % 2;
                if (!visible(p, key, position[i / 2])) s[j][i] = NEGATIVE_INFINITY;
            }
        }
    }

    // Makes `highest` cover `candidate` (this lane's largest new scores) and rescales what is there.
    DEVICE void raise(float (&candidate)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            candidate[h] = fmaxf(candidate[h], __shfl_xor_sync(FULL_WARP, candidate[h], 1));
            candidate[h] = fmaxf(candidate[h], __shfl_xor_sync(FULL_WARP, candidate[h], 2));
            const float raised = fmaxf(highest[h], candidate[h]);
            const float kept = raised == NEGATIVE_INFINITY ? 1.f : fast_exp2(highest[h] - raised);
            highest[h] = raised;
            total[h] *= kept;
#pragma unroll
            for (int i = 0; i < VALUE_TILES; i++) {
                o[i][2 * h] *= kept;
                o[i][2 * h + 1] *= kept;
            }
        }
    }

    // Adds the page's values, weighted; `highest` already covers the scores. fragment(c): dimensions 16 c ..
    // Slots after the `last` that is written may hold another sequence's NaN, and 0 * NaN is NaN: they count as 0,
    // unless IS_WHOLE says that there are none.
    template <bool IS_WHOLE, class Fragments>
    DEVICE void accumulate(const Fragments& fragment, const float (&s)[2][4], int last, int lane) {
        const int written = last - lane % 4 * 4;  // this lane's tokens are 4 t .. 4 t + 3
        const u32 first_two = (written >= 0 ? 0xffffu : 0u) | (written >= 1 ? 0xffff0000u : 0u);
        const u32 last_two = (written >= 2 ? 0xffffu : 0u) | (written >= 3 ? 0xffff0000u : 0u);
        float weight[2][4];
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // finite, so that masked scores weigh 0 where nothing is seen yet, and NaN, which no maximum shows,
                // stays
                const float top = IS_WHOLE ? highest[i / 2] : fmaxf(highest[i / 2], -3.402823466e38f);
                weight[j][i] = fast_exp2(s[j][i] - top);
                total[i / 2] += weight[j][i];
            }
        }
        const u32 a[4] = {pack(weight[0][0], weight[0][1]), pack(weight[0][2], weight[0][3]),
                          pack(weight[1][0], weight[1][1]), pack(weight[1][2], weight[1][3])};
#pragma unroll
        for (int c = 0; c < VALUE_TILES / 2; c++) {
            const uint4 b = fragment(c);
            if constexpr (IS_WHOLE) {
                mma(o[2 * c], a, b.x, b.y);
                mma(o[2 * c + 1], a, b.z, b.w);
            } else {
                mma(o[2 * c], a, b.x & first_two, b.y & last_two);
                mma(o[2 * c + 1], a, b.z & first_two, b.w & last_two);
            }
        }
    }

    // This lane's largest scores of a page.
    DEVICE static void largest(const float (&s)[2][4], float (&candidate)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
            candidate[h] = fmaxf(candidate[h], top);
        }
    }

    DEVICE void sum_totals() {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 1);
            total[h] += __shfl_xor_sync(FULL_WARP, total[h], 2);
        }
    }
};

// What a sum over keys with this largest score counts in one with the largest score `overall`.
DEVICE float merge_factor(float highest, float overall) {
    return highest == NEGATIVE_INFINITY ? 0.f : fast_exp2(highest - overall);
}
