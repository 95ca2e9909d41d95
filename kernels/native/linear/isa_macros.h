// Compiler spellings shared by the per-ISA translation units. The portable one is left to the compiler's own judgement:
// its vectors are arrays, and unrolling them by force takes minutes to compile.
#pragma once
#if defined(LAMINA_LINEAR_PORTABLE)
#define LAMINA_INLINE_MEMBER inline
#define LAMINA_INLINE static inline
#define LAMINA_LAMBDA
#define LAMINA_UNROLL
#else
#define LAMINA_INLINE_MEMBER inline __attribute__((always_inline))
#define LAMINA_INLINE static inline __attribute__((always_inline))
#define LAMINA_LAMBDA __attribute__((always_inline))
#if defined(__clang__)
#define LAMINA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define LAMINA_UNROLL _Pragma("GCC unroll 64")
#endif
#endif
