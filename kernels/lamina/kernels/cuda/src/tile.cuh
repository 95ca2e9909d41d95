// A warp's share of attention on tensor cores, for caches of 16 or 8 bits: KV_TYPE (1 f16, 2 bf16, 3 q8), KEY_DIM,
// VALUE_DIM.
//
// A warp holds tiles of 16 queries (see attention.cuh): Q as A fragments, the scores of a page as D fragments, which are
// the A fragments of P V as they stand, and the output.
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

// 2^x of both. In f16 that is one instruction, with f16's relative error of x: 3e-4 where the weight is 1/2, and less
// of the whole for any other.
DEVICE u32 weights_of(float low, float high) {
    return KV_TYPE == KV_BF16 ? pack_bf16s(fast_exp2(low), fast_exp2(high)) : exp2_halves(pack_halves(low, high));
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

// COUNT queries as numbers of 16 bits, for A fragments. The four eights of a chunk are swapped with the next four's in
// every other row, where rows would else begin in the same bank: a fragment takes those of two rows at a time.
template <int COUNT>
struct Queries {
    uint4 eights[COUNT][KEY_WIDTH / 8];

    DEVICE static int place(int row, int eight) { return KEY_CHUNKS % 2 ? eight : eight ^ (row % 2 * 4); }

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
            reinterpret_cast<uint2*>(&eights[local][place(local, quad / 2)])[quad % 2] =
                make_uint2(pack(scale * x.x, scale * x.y), pack(scale * x.z, scale * x.w));
        }
    }
};

// Which tokens of a page are written. Slots after the `last` may hold another sequence's NaN, and 0 * NaN is NaN: their
// values count as 0.
struct Written {
    u32 first_two, last_two;

    DEVICE Written(int last, int lane) {
        const int written = last - lane % 4 * 4;  // this lane's tokens are 4 t .. 4 t + 3
        first_two = (written >= 0 ? 0xffffu : 0u) | (written >= 1 ? 0xffff0000u : 0u);
        last_two = (written >= 2 ? 0xffffu : 0u) | (written >= 3 ? 0xffff0000u : 0u);
    }
    DEVICE uint4 of(const uint4& values) const {
        uint4 kept = values;
        kept.x &= first_two;
        kept.y &= last_two;
        kept.z &= first_two;
        kept.w &= last_two;
        return kept;
    }
};

// Dimensions 32 c .. of sixteen queries as A fragments.
struct QueryChunk {
    u32 a[2][4];

    template <int COUNT>
    DEVICE void load(const Queries<COUNT>& from, int first, int c, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {  // eight dimensions 32 c + 8 t ..
            const uint4 x = from.eights[first + g + 8 * h][from.place(g, 4 * c + t)];
            a[0][h] = x.x;
            a[0][h + 2] = x.y;
            a[1][h] = x.z;
            a[1][h + 2] = x.w;
        }
    }
    // Adds to the scores of eight keys, whose fragment this is.
    DEVICE void multiply(const uint4& keys, float (&s)[4]) const {
        mma(s, a[0], keys.x, keys.y);
        mma(s, a[1], keys.z, keys.w);
    }
};

struct Tile {
    float o[VALUE_TILES][4];
    float highest[2];            // rows g and g + 8
    float total[4];              // of the weights: a D fragment, of which all columns are equal
    int position[2];             // -1: no such query
    int first_position, last_position;  // of all sixteen

    // Positions of queries first_query .. + 15 of `queries`; first_row is the sequence's. Step inputs only.
    DEVICE void start(const Attention& p, int first_row, int first_query, int queries, int lane) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int m = first_query + lane / 4 + 8 * h;
            position[h] = m < queries ? p.positions[first_row + m / p.group] : -1;
            highest[h] = NEGATIVE_INFINITY;
            total[2 * h] = total[2 * h + 1] = 0.f;
        }
        first_position = p.positions[first_row + min(first_query, queries - 1) / p.group];
        last_position = p.positions[first_row + min(first_query + 15, queries - 1) / p.group];
#pragma unroll
        for (int i = 0; i < VALUE_TILES; i++)
            for (int j = 0; j < 4; j++) o[i][j] = 0.f;
    }
    // Whether every query sees first_key, if it comes before the query.
    DEVICE bool is_near(const Attention& p, int first_key) const {
        return p.window <= 0 || last_position - first_key < p.window;
    }
    // Whether every query comes after `count` pages of keys from first_key on, or with the last.
    DEVICE bool is_after(int first_key, int count) const {
        return first_key + count * PAGE_TOKENS <= first_position + 1;
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
            if (raised == highest[h]) continue;  // most of the time, and nothing to multiply
            const float kept = fast_exp2(highest[h] - raised);
            highest[h] = raised;
            total[2 * h] *= kept;
            total[2 * h + 1] *= kept;
#pragma unroll
            for (int i = 0; i < VALUE_TILES; i++) {
                o[i][2 * h] *= kept;
                o[i][2 * h + 1] *= kept;
            }
        }
    }

    // Scores of a page to weights, as the A fragment of P V, and into the total; `highest` already covers them.
    template <bool IS_WHOLE>
    DEVICE void weigh(const float (&s)[2][4], u32 (&a)[4]) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // finite, so that masked scores weigh 0 where nothing is seen yet, and NaN, which no maximum shows,
                // stays
                const float top = IS_WHOLE ? highest[h] : fmaxf(highest[h], -3.402823466e38f);
                a[2 * j + h] = weights_of(s[j][2 * h] - top, s[j][2 * h + 1] - top);
            }
        }
        constexpr u32 ONES = KV_TYPE == KV_BF16 ? 0x3f803f80u : 0x3c003c00u;
        mma(total, a, ONES, ONES);
    }

    // Adds the values of dimensions 16 c .., whose fragment this is, weighted.
    DEVICE void add_values(int c, const u32 (&a)[4], const uint4& values) {
        mma(o[2 * c], a, values.x, values.y);
        mma(o[2 * c + 1], a, values.z, values.w);
    }

    // This lane's largest scores of a page.
    DEVICE static void largest(const float (&s)[2][4], float (&candidate)[2]) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
            candidate[h] = fmaxf(candidate[h], top);
        }
    }
};
