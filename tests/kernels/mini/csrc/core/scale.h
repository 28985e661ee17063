// One constant that the kernel and the host function see: the header of the stale-header tests.
#pragma once
constexpr float MINI_SCALE = 1.0f;
