//! Conversion of cpu shares (cgroup v1) to weights (v2) and back. Pure.
//!
//! Shares are 2 to 262144, default 1024; weights are 1 to 10000, default 100. runc uses the same conversion since 1.3.2
//! (opencontainers/cgroups, pull request 20). It maps the minimum, maximum and default of one scale to those of the other.

const MIN_SHARES: u64 = 2;
const MAX_SHARES: u64 = 262_144;
const DEFAULT_SHARES: u64 = 1024;
const DEFAULT_WEIGHT: u64 = 100;
const MAX_WEIGHT: u64 = 10_000;

/// The v2 weight of v1 shares.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "from 1 to 10000"
)]
pub(crate) fn weight_of_shares(shares: u64) -> u64 {
    if shares <= MIN_SHARES {
        return 1;
    }
    if shares >= MAX_SHARES {
        return MAX_WEIGHT;
    }
    let log = (shares as f64).log2();
    let exponent = (log * log + 125.0 * log) / 612.0 - 7.0 / 34.0;
    (10_f64.powf(exponent).ceil() as u64).clamp(1, MAX_WEIGHT)
}

/// The v1 shares for a v2 weight: the lowest shares with this weight, but the default shares for the default weight.
pub(crate) fn shares_of_weight(weight: u64) -> u64 {
    if weight == DEFAULT_WEIGHT {
        return DEFAULT_SHARES;
    }
    let (mut low, mut high) = (MIN_SHARES, MAX_SHARES);
    while low < high {
        let middle = low.midpoint(high);
        if weight_of_shares(middle) < weight {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minimum_maximum_and_default_are_kept() {
        for (shares, weight) in [(2, 1), (1024, 100), (262_144, 10_000)] {
            assert_eq!(weight_of_shares(shares), weight);
        }
        assert_eq!([1, 100].map(shares_of_weight), [2, 1024]);
        for weight in 2..=10_000 {
            let shares = shares_of_weight(weight);
            assert!(weight_of_shares(shares) >= weight);
            assert!(weight == 100 || weight_of_shares(shares - 1) < weight, "{weight}");
        }
    }
}
