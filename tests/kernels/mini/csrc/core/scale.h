// One constant that both halves of the extension see: the header of the stale-header tests.
#pragma once
constexpr float MINI_SCALE = 1.0f;
