//! Settings of image garbage collection, with the rules of the kubelet.

use coracle_agent::ImageGcPolicy;

use super::NodeSettings;

/// The policy of the settings. Refuses thresholds and ages that contradict each other, as the kubelet does.
pub(super) fn decide(node: &NodeSettings) -> anyhow::Result<ImageGcPolicy> {
    let high_threshold = node.image_gc_high_threshold.0;
    let default = ImageGcPolicy::default().low_threshold.min(high_threshold.saturating_sub(5));
    // If only the high threshold is set, and it is below the default, the low threshold is 5 below it.
    let low_threshold = node.image_gc_low_threshold.map_or(default, |percent| percent.0);
    let (minimum_age, maximum_age) = (node.image_minimum_gc_age.0, node.image_maximum_gc_age.0);
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
    use std::time::Duration;

    use super::super::tests::node_settings;
    use super::*;

    fn of(text: &str) -> Result<ImageGcPolicy, String> {
        decide(&node_settings(text)?).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults_are_the_kubelets() {
        let policy = of("").unwrap();
        assert_eq!(policy, ImageGcPolicy::default());
        assert_eq!((policy.high_threshold, policy.low_threshold), (85, 80));
        assert_eq!((policy.minimum_age, policy.maximum_age), (Duration::from_secs(120), Duration::ZERO));
        assert_eq!(of("image-gc-high-threshold = 70").unwrap().low_threshold, 65);
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(of("image-gc-high-threshold = 80\nimage-gc-low-threshold = 80").is_err());
        assert!(of("image-gc-low-threshold = 90").is_err());
        assert!(of("image-maximum-gc-age = \"2m\"").is_err());
        assert!(of("image-minimum-gc-age = \"1s\"\nimage-maximum-gc-age = \"2m\"").is_ok());
        for wrong in ["two minutes", "2", "-1s"] {
            assert!(of(&format!("image-minimum-gc-age = \"{wrong}\"")).is_err(), "{wrong}");
        }
    }
}
