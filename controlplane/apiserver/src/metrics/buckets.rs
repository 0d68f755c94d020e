//! Upper bounds of the buckets of histograms, as upstream.

/// Upper bounds of the durations of requests, in seconds.
pub(super) const DURATIONS: [f64; 23] = [
    0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0,
];
/// Upper bounds of the durations of the steps of admission, in seconds.
pub(super) const STEP_DURATIONS: [f64; 6] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5];
/// Upper bounds of the durations of webhooks, in seconds.
pub(super) const WEBHOOK_DURATIONS: [f64; 8] = [0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0, 25.0];
/// Upper bounds of the sizes of responses, in bytes: from 1 kB to 1 GB.
pub(super) const SIZES: [f64; 7] = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];
/// Upper bounds of the request durations without waits (SLI), in seconds.
pub(super) const SLI_DURATIONS: [f64; 21] = [
    0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0,
    45.0, 60.0,
];
/// Upper bounds of the remaining validity of client certificates, in seconds: from 30 minutes to 360 days.
pub(super) const VALIDITIES: [f64; 14] = [
    0.0,
    1800.0,
    3600.0,
    7200.0,
    21600.0,
    43200.0,
    86400.0,
    172_800.0,
    345_600.0,
    604_800.0,
    2_592_000.0,
    7_776_000.0,
    15_552_000.0,
    31_104_000.0,
];
/// Upper bounds of the durations of admission policies, in seconds.
pub(super) const POLICY_DURATIONS: [f64; 5] = [5e-7, 0.001, 0.01, 0.1, 1.0];
/// Upper bounds of the durations of authentications, authorization checks and impersonations, in seconds: from 1 ms to
/// 16 s.
pub(super) const ACCESS_DURATIONS: [f64; 15] = [
    0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192, 16.384,
];
/// Upper bounds of the durations until the first objects of a watch are sent, in seconds.
pub(super) const INITIAL_EVENTS: [f64; 17] =
    [0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0];
/// Upper bounds of the sizes of the events of watches, in bytes.
pub(super) const EVENT_SIZES: [f64; 8] =
    [1024.0, 2048.0, 4096.0, 8192.0, 16_384.0, 32_768.0, 65_536.0, 131_072.0];
