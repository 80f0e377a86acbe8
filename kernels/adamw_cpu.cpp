// One AdamW step over moments stored by fp8_expanded, on CPUs; see adamw.py and codecs/expanded.py for what it
// computes. Plain C++ without library headers: it compiles in a second. Every inner loop runs over one group
// and vectorizes; groups are shared among threads.

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

// of positive, normal x; the series of atanh, cut at 1e-9
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
    float log2_of_code[128];  // of |code| / max; of zero so low that any power of it is zero

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
    // a quarter of the logarithm: the factor itself may be as small as 2^-250
    float quarter = 4.0f / static_cast<float>(exponent);
#pragma omp simd
    for (int i = 0; i < n; i++) {
        float root = exp2_of(f.log2_of_code[codes[i] & 127] * quarter), square = root * root;
        float y = scale * square * square;
        x[i] = codes[i] & 128 ? -y : y;
    }
}

// the FP32 logarithm, or that of 2^-120 for anything smaller
inline float floored_log2(float x) { return log2_of(std::max(x, 0x1p-120f)); }

template <bool E5M2>
inline void encode(const float* x, uint8_t* codes, float* scale, uint8_t* exponent, int n) {
    const auto& f = FORMAT<E5M2>;
    // magnitudes order as their bit patterns do
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
        // masks, since a compiler that finds branches here does not vectorize
        int32_t is_small = -(y < f.smallest_normal), is_zero = -(magnitude == 0);
        int32_t is_odd = -(magnitude >= 0x7f800000);
        int32_t code = (is_small & subnormal) | (~is_small & normal);
        code = (is_odd & 0x7f) | (~is_odd & ~is_zero & code);
        codes[i] = static_cast<uint8_t>(code | ((bits >> 24) & 0x80));
    }
}

struct Step {
    float lr, beta1, beta2, eps, weight_decay, correction1, root_correction2, grad_scale;
};

template <bool M_E5M2, bool V_E5M2>
void run(float* param, const float* grad, uint8_t* m_codes, float* m_scale, uint8_t* m_exponent,
         uint8_t* v_codes, float* v_scale, uint8_t* v_exponent, int64_t numel, int64_t group, const Step s,
         int threads) {
    const float keep = 1.0f - s.lr * s.weight_decay, size = s.lr / s.correction1;
    const int64_t groups = (numel + group - 1) / group;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        float m[LARGEST_GROUP], v[LARGEST_GROUP];
        const int64_t first = g * group;
        const int n = static_cast<int>(std::min(group, numel - first));
        decode<M_E5M2>(m_codes + first, m_scale[g], m_exponent[g], m, n);
        decode<V_E5M2>(v_codes + first, v_scale[g], v_exponent[g], v, n);
        float* p = param + first;
        const float* gradient = grad + first;
#pragma omp simd
        for (int i = 0; i < n; i++) {
            float d = gradient[i] * s.grad_scale;
            m[i] += (1.0f - s.beta1) * (d - m[i]);
            v[i] = s.beta2 * v[i] + (1.0f - s.beta2) * d * d;
            p[i] = keep * p[i] - size * m[i] / (std::sqrt(v[i]) / s.root_correction2 + s.eps);
        }
        encode<M_E5M2>(m, m_codes + first, m_scale + g, m_exponent + g, n);
        encode<V_E5M2>(v, v_codes + first, v_scale + g, v_exponent + g, n);
    }
}

}  // namespace

extern "C" void adamw_step(float* param, const float* grad, uint8_t* m_codes, float* m_scale,
                           uint8_t* m_exponent, uint8_t* v_codes, float* v_scale, uint8_t* v_exponent,
                           int64_t numel, int64_t group, int m_e5m2, int v_e5m2, const Step* step,
                           int threads) {
    auto chosen = m_e5m2 ? (v_e5m2 ? run<true, true> : run<true, false>)
                         : (v_e5m2 ? run<false, true> : run<false, false>);
    chosen(param, grad, m_codes, m_scale, m_exponent, v_codes, v_scale, v_exponent, numel, group, *step,
           threads);
}
