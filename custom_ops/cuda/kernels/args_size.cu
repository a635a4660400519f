// The sizes of the argument structures, for those who fill them from another language.
#include "launchers.h"

#define FE_DEFINE_SIZE(name, Args) \
  FE_EXPORT int fe_##name##_args_size() { return static_cast<int>(sizeof(fastengine::cuda::Args)); }
FE_OPERATORS(FE_DEFINE_SIZE)
