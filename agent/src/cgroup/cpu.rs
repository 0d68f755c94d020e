//! CPU shares and quota of a number of millicores. Pure.

/// The kernel's minimum of cpu.shares.
pub(crate) const MIN_SHARES: i64 = 2;
pub(super) const MAX_SHARES: i64 = 262_144;
/// Length of one accounting period of the bandwidth controller, in microseconds.
pub(crate) const PERIOD: i64 = 100_000;
const MIN_QUOTA: i64 = 1_000;
/// Maximum quota in microseconds. The kernel refuses a larger quota (`max_cfs_runtime`, 2^44 - 1 µs).
const MAX_QUOTA: i64 = (1 << 44) - 1;

/// CPU shares of a number of millicores.
pub(crate) fn shares(millis: i64) -> i64 {
    (millis.saturating_mul(1024) / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// Microseconds of CPU time in each period. None means no limit.
pub(crate) fn quota(millis: i64) -> Option<i64> {
    (millis > 0).then(|| (millis.saturating_mul(PERIOD) / 1000).clamp(MIN_QUOTA, MAX_QUOTA))
}
