/* The kernels of an instruction set with other prefetch hints than the engine's: to the second
 * level with T1_HINT, else none. The build names the SOURCE and renames its entry. */
#include <immintrin.h>

#ifdef T1_HINT
#define _MM_HINT_T0 _MM_HINT_T1
#else
#undef _mm_prefetch
#define _mm_prefetch(address, hint) ((void)(address))
#endif

#include SOURCE
