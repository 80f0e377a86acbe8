// One AdamW step on CPUs, over moments stored by fp8_expanded, or by ratio8 and log8. reference.py and
// ../codecs/ specify it. Plain C++ without library headers compiles in a second. Every inner loop runs over
// one group and vectorizes; threads share the groups.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LARGEST_GROUP = 256;

template <class To, class From>
inline To as(From x) {
    To y;
    std::memcpy(&y, &x, sizeof(y));
    return y;
}

// log2 of a positive, normal x; the series of atanh, cut at 1e-9
inline float log2_of(float x) {
    int32_t bits = as<int32_t>(x);
    int32_t power = (bits - 0x3f3504f3) >> 23;
    float m = as<float>(bits - (power << 23));
    float s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    float sum = 0.3205989f;
    sum = sum * s2 + 0.4121986f;
    sum = sum * s2 + 0.5770780f;
    sum = sum * s2 + 0.9617967f;
    sum = sum * s2 + 2.8853900f;
    return s * sum + static_cast<float>(power);
}

// 2^x; zero below 2^-126
inline float exp2_of(float x) {
    float whole = std::floor(x + 0.5f), f = x - whole;
    float sum = 1.5252734e-5f;
    sum = sum * f + 1.5403530e-4f;
    sum = sum * f + 1.3333558e-3f;
    sum = sum * f + 9.6181291e-3f;
    sum = sum * f + 5.5504109e-2f;
    sum = sum * f + 2.4022651e-1f;
    sum = sum * f + 6.9314718e-1f;
    sum = sum * f + 1.0f;
    float clamped = std::min(std::max(whole, -126.0f), 127.0f);
    float power = as<float>((static_cast<int32_t>(clamped) + 127) << 23);
    return x < -126.0f ? 0.0f : sum * power;
}

template <bool E5M2>
struct Format {
    static constexpr int mantissa = E5M2 ? 2 : 3, bias = E5M2 ? 15 : 7, shift = 23 - mantissa;
    static constexpr float max = E5M2 ? 57344.0f : 448.0f;
    static constexpr float tiny = E5M2 ? 0x1p-16f : 0x1p-9f, smallest_normal = E5M2 ? 0x1p-14f : 0x1p-6f;

    float log2_max = std::log2(max);
    float span = 16.0f * std::log2(max * (max / 2.0f));  // log2(max^2 / 2), in sixteenths
    float log2_of_code[128];  // log2(|code| / max); for zero, so low that any power of it is zero

    Format() {
        for (int code = 0; code < 128; code++) {
            int power = code >> mantissa, rest = code & ((1 << mantissa) - 1);
            double y = power ? std::ldexp(1.0 + std::ldexp(rest, -mantissa), power - bias)
                             : std::ldexp(rest, 1 - bias - mantissa);
            log2_of_code[code] = y > max ? NAN : y > 0 ? static_cast<float>(std::log2(y / max)) : -1e5f;
        }
    }
};

template <bool E5M2>
const Format<E5M2> FORMAT;

template <bool E5M2>
inline void decode(const uint8_t* codes, float scale, int exponent, float* x, int n) {
    const auto& f = FORMAT<E5M2>;
    // a quarter of the logarithm, because the factor itself may be as small as 2^-250
    float quarter = 4.0f / static_cast<float>(exponent);
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float root = exp2_of(f.log2_of_code[codes[i] & 127] * quarter), square = root * root;
        float y = scale * square * square;
        x[i] = codes[i] & 128 ? -y : y;
    }
}

// the FP32 logarithm; the logarithm of 2^-120 for smaller x
inline float floored_log2(float x) { return log2_of(std::max(x, 0x1p-120f)); }

template <bool E5M2>
inline void encode(const float* x, uint8_t* codes, float* scale, uint8_t* exponent, int n) {
    const auto& f = FORMAT<E5M2>;
    // magnitudes have the order of their bit patterns
    int32_t largest = 0, smallest = 0x7fffffff;
#pragma omp simd reduction(max : largest) reduction(min : smallest)
    for (int i = 0; i < n; i++) {
        int32_t bits = as<int32_t>(x[i]) & 0x7fffffff;
        bool finite = bits < 0x7f800000;
        largest = std::max(largest, finite ? bits : 0);
        smallest = std::min(smallest, finite && bits != 0 ? bits : 0x7fffffff);
    }
    float top = as<float>(largest), k = 255.0f;
    float log2_top = floored_log2(top);
    if (largest > 0) {
        k = std::floor(f.span / (log2_top - floored_log2(as<float>(smallest))));
        k = std::min(std::max(k, 1.0f), 255.0f);
    }
    *scale = top;
    *exponent = static_cast<uint8_t>(k);
    const float power = k / 16.0f, log2_max = f.log2_max;
    constexpr int half = (1 << (f.shift - 1)) - 1, rebias = (127 - f.bias) << f.mantissa;
#pragma omp simd
    for (int i = 0; i < n; i++) {
        int32_t bits = as<int32_t>(x[i]), magnitude = bits & 0x7fffffff;
        float y = exp2_of(power * (floored_log2(as<float>(magnitude)) - log2_top) + log2_max);
        y = std::min(std::max(y, f.tiny), f.max);
        // to nearest even; adding 2^23 leaves whole steps of a subnormal in the lowest bits
        int32_t of_y = as<int32_t>(y);
        int32_t normal = ((of_y + half + ((of_y >> f.shift) & 1)) >> f.shift) - rebias;
        int32_t subnormal = as<int32_t>(y * (1.0f / f.tiny) + 8388608.0f) & 0xff;
        // masks, because compilers do not vectorize this loop with branches
        int32_t is_small = -(y < f.smallest_normal), is_zero = -(magnitude == 0);
        int32_t is_odd = -(magnitude >= 0x7f800000);
        int32_t code = (is_small & subnormal) | (~is_small & normal);
        code = (is_odd & 0x7f) | (~is_odd & ~is_zero & code);
        codes[i] = static_cast<uint8_t>(code | ((bits >> 24) & 0x80));
    }
}

// the storage of one group
template <class Code>
struct Stored {
    Code* codes;
    float* scale;
    uint8_t* exponent;
};

struct Step {
    // rates are 1 - beta; computed in FP32 from beta they would lose digits
    float lr, rate1, beta2, rate2, eps, weight_decay, correction1, root_correction2, grad_scale;
    uint32_t turns;  // the dither of the step; `lanes` is its increment per element of a group
    uint32_t lanes;
    int dither;
};

inline float dither_of(uint32_t turns) {
    return static_cast<float>(static_cast<int32_t>(turns)) * ((1.0f - 0x1p-23f) * 0x1p-32f);
}

// fp8_expanded: each moment is stored independently of the other
template <bool M_E5M2, bool V_E5M2>
struct Expanded {
    using Code = uint8_t;
    static void load(Stored<Code> m, Stored<uint8_t> v, float* x, float* y, int n) {
        decode<M_E5M2>(m.codes, *m.scale, *m.exponent, x, n);
        decode<V_E5M2>(v.codes, *v.scale, *v.exponent, y, n);
    }
    static void store(const float* x, const float* y, Stored<Code> m, Stored<uint8_t> v, int n, const Step&) {
        encode<M_E5M2>(x, m.codes, m.scale, m.exponent, n);
        encode<V_E5M2>(y, v.codes, v.scale, v.exponent, n);
    }
};

// log8 for the second moment, ratio8 for the first
struct Ratio {
    using Code = int8_t;

    // roots of the stored values, as Stored.roots in codecs/codec.py
    static void roots(Stored<uint8_t> v, float* r, int n) {
        const bool is_live = *v.scale > 0.0f;
        const float half_step = is_live ? static_cast<float>(*v.exponent) * (1.0f / 512.0f) : 0.0f;
        const float top = is_live ? 0.5f * floored_log2(*v.scale) : 0.0f;
#pragma omp simd
        for (int i = 0; i < n; i++) r[i] = exp2_of(static_cast<float>(v.codes[i] - 254) * half_step + top);
    }

    static void load(Stored<Code> m, Stored<uint8_t> v, float* x, float* y, int n) {
        float r[LARGEST_GROUP];
        roots(v, r, n);
        const float half_step = static_cast<float>(*v.exponent) * (1.0f / 512.0f), largest = *v.scale;
        const float unit = *m.scale * 6.98705923e-4f;  // 127^-1.5
#pragma omp simd
        for (int i = 0; i < n; i++) {
            float u = static_cast<float>(m.codes[i]);
            float value = u * std::sqrt(std::fabs(u)) * unit * r[i];
            x[i] = m.codes[i] == -128 ? NAN : value;
            float root = exp2_of(static_cast<float>(v.codes[i] - 254) * half_step);
            float square = largest * root * root;
            y[i] = v.codes[i] == 0 ? 0.0f : v.codes[i] == 255 ? NAN : square;
        }
    }

    static void store_second(const float* y, Stored<uint8_t> v, int n, const Step& s) {
        // as integers, negative values are below zero, and non-finite values above all finite ones
        int32_t largest = 0, smallest = 0x7fffffff;
#pragma omp simd reduction(max : largest) reduction(min : smallest)
        for (int i = 0; i < n; i++) {
            int32_t bits = as<int32_t>(y[i]);
            bool usable = bits > 0 && bits < 0x7f800000;
            largest = std::max(largest, usable ? bits : 0);
            smallest = std::min(smallest, usable ? bits : 0x7fffffff);
        }
        const float log2_top = floored_log2(as<float>(largest));
        float exponent = 255.0f;
        if (largest > 0) {
            float octaves = log2_top - floored_log2(as<float>(smallest));
            exponent = std::min(std::floor(octaves * (256.0f / 253.0f)) + 1.0f, 255.0f);
        }
        *v.scale = as<float>(largest);
        *v.exponent = static_cast<uint8_t>(exponent);
        const float codes_per_octave = 256.0f / exponent, share = s.dither ? 1.0f : 0.0f;
#pragma omp simd
        for (int i = 0; i < n; i++) {
            int32_t bits = as<int32_t>(y[i]);
            float code = (floored_log2(y[i]) - log2_top) * codes_per_octave + 254.0f;
            code = std::floor(code + share * dither_of(s.turns + s.lanes * i) + 0.5f);
            int32_t whole = static_cast<int32_t>(std::min(std::max(code, 1.0f), 254.0f));
            int32_t is_zero = -((bits & 0x7fffffff) == 0);
            int32_t is_odd = -(static_cast<uint32_t>(bits) >= 0x7f800000u) & ~is_zero;
            v.codes[i] = static_cast<uint8_t>((is_odd & 255) | (~is_odd & ~is_zero & whole));
        }
    }

    static void store(const float* x, const float* y, Stored<Code> m, Stored<uint8_t> v, int n,
                      const Step& s) {
        store_second(y, v, n, s);
        float u[LARGEST_GROUP];
        roots(v, u, n);
        int32_t largest = 0;
#pragma omp simd reduction(max : largest)
        for (int i = 0; i < n; i++) {
            u[i] = x[i] / u[i];
            int32_t magnitude = as<int32_t>(u[i]) & 0x7fffffff;
            largest = std::max(largest, magnitude < 0x7f800000 ? magnitude : 0);
        }
        int32_t rounded = std::min((largest + 0x400) & ~0x7ff, 0x7f7ff800);
        *m.scale = as<float>(largest) < 0x1p-110f ? 0.0f : as<float>(rounded);
        const float offset = 6.9886847f - log2_of(std::max(*m.scale, 0x1p-110f)) * (2.0f / 3.0f);
        const int32_t is_dead = -(*m.scale == 0.0f);
        const float turn = dither_of(s.turns);
#pragma omp simd
        for (int i = 0; i < n; i++) {
            int32_t bits = as<int32_t>(u[i]), magnitude = bits & 0x7fffffff;
            float y = exp2_of(log2_of(as<float>(std::max(magnitude, 0x00800000))) * (2.0f / 3.0f) + offset);
            y = std::min(y, 127.0f);
            y += turn * std::min(std::max(8.5f - y, 0.0f), 1.0f);
            // adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits
            int32_t code = as<int32_t>(y + 12582912.0f) & 0xff;
            int32_t sign = bits >> 31;
            int32_t is_zero = -(magnitude < 0x00800000) | is_dead, is_odd = -(magnitude >= 0x7f800000);
            code = (code ^ sign) - sign;
            m.codes[i] = static_cast<int8_t>((is_odd & -128) | (~is_odd & ~is_zero & code));
        }
    }
};

template <class Pair>
void run(float* param, const float* grad, void* m_codes, float* m_scale, uint8_t* m_exponent,
         uint8_t* v_codes, float* v_scale, uint8_t* v_exponent, int64_t numel, int64_t group, const Step s,
         int threads) {
    const float keep = 1.0f - s.lr * s.weight_decay, size = s.lr / s.correction1;
    const int64_t groups = (numel + group - 1) / group;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        float m[LARGEST_GROUP], v[LARGEST_GROUP];
        const int64_t first = g * group;
        const int n = static_cast<int>(std::min(group, numel - first));
        using Code = typename Pair::Code;
        Stored<Code> first_moment{static_cast<Code*>(m_codes) + first, m_scale + g, m_exponent + g};
        Stored<uint8_t> second_moment{v_codes + first, v_scale + g, v_exponent + g};
        Pair::load(first_moment, second_moment, m, v, n);
        float* p = param + first;
        const float* gradient = grad + first;
#pragma omp simd
        for (int i = 0; i < n; i++) {
            float d = gradient[i] * s.grad_scale;
            m[i] += s.rate1 * (d - m[i]);
            v[i] = s.beta2 * v[i] + s.rate2 * d * d;
            p[i] = keep * p[i] - size * m[i] / (std::sqrt(v[i]) / s.root_correction2 + s.eps);
        }
        Pair::store(m, v, first_moment, second_moment, n, s);
    }
}

}  // namespace

// formats: 0 to 3 for fp8_expanded; bit 0 is set if the first moment is E5M2, bit 1 if the second is. 4 for
// ratio8 and log8
extern "C" void adamw_step(float* param, const float* grad, void* m_codes, float* m_scale,
                           uint8_t* m_exponent, uint8_t* v_codes, float* v_scale, uint8_t* v_exponent,
                           int64_t numel, int64_t group, int formats, const Step* step, int threads) {
    constexpr decltype(&run<Ratio>) chosen[] = {run<Expanded<false, false>>, run<Expanded<true, false>>,
                                                run<Expanded<false, true>>, run<Expanded<true, true>>,
                                                run<Ratio>};
    chosen[formats](param, grad, m_codes, m_scale, m_exponent, v_codes, v_scale, v_exponent, numel, group,
                    *step, threads);
}
