//! When unused images are removed, as settings: those of the kubelet.

use std::str::FromStr;
use std::time::Duration;

use coracle_agent::ImageGcPolicy;
use serde::Deserialize;

/// A duration as Kubernetes writes it: `2m`, `168h`, `0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Age(Duration);

/// What is no duration.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a duration such as 2m, 168h or 0")]
pub(crate) struct InvalidAge(String);

// === impl Age ===

impl FromStr for Age {
    type Err = InvalidAge;

    fn from_str(text: &str) -> Result<Age, InvalidAge> {
        coracle_agent::duration(text).map(Age).ok_or_else(|| InvalidAge(text.to_owned()))
    }
}

impl TryFrom<String> for Age {
    type Error = InvalidAge;

    fn try_from(text: String) -> Result<Age, InvalidAge> {
        text.parse()
    }
}

/// Decides what was not asked for, and refuses what contradicts itself, as the kubelet does.
pub(super) fn decide(
    (high, low): (Option<u8>, Option<u8>),
    (minimum, maximum): (Option<Age>, Option<Age>),
) -> anyhow::Result<ImageGcPolicy> {
    let defaults = ImageGcPolicy::default();
    let high_threshold = high.unwrap_or(defaults.high_threshold);
    // Who lowers only the one means the distance between them.
    let low_threshold = low.unwrap_or(defaults.low_threshold.min(high_threshold.saturating_sub(5)));
    let minimum_age = minimum.map_or(defaults.minimum_age, |age| age.0);
    let maximum_age = maximum.map_or(defaults.maximum_age, |age| age.0);
    anyhow::ensure!(
        low_threshold < high_threshold,
        "image-gc-low-threshold {low_threshold} must be less than image-gc-high-threshold {high_threshold}"
    );
    anyhow::ensure!(
        maximum_age.is_zero() || maximum_age > minimum_age,
        "image-maximum-gc-age {maximum_age:?} must be 0 or more than image-minimum-gc-age {minimum_age:?}"
    );
    Ok(ImageGcPolicy { high_threshold, low_threshold, minimum_age, maximum_age })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(text: &str) -> Option<Age> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn the_defaults_are_the_kubelets() {
        let policy = decide((None, None), (None, None)).unwrap();
        assert_eq!(policy, ImageGcPolicy::default());
        assert_eq!((policy.high_threshold, policy.low_threshold), (85, 80));
        assert_eq!((policy.minimum_age, policy.maximum_age), (Duration::from_secs(120), Duration::ZERO));
        assert_eq!(decide((Some(70), None), (None, None)).unwrap().low_threshold, 65);
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        assert!(decide((Some(80), Some(80)), (None, None)).is_err());
        assert!(decide((None, Some(90)), (None, None)).is_err());
        assert!(decide((None, None), (None, age("2m"))).is_err());
        assert!(decide((None, None), (age("1s"), age("2m"))).is_ok());
        assert!(
            "two minutes".parse::<Age>().is_err()
                && "2".parse::<Age>().is_err()
                && "-1s".parse::<Age>().is_err()
        );
    }
}
