//! Settings of the node's reports to the API server. Names and rules are those of the kubelet.

use clap::ValueEnum;
use coracle_agent::{NodeReports, RequestRate};

use super::NodeSettings;
use super::value::choices;

/// The kubelet's `--cloud-provider`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CloudProvider {
    External,
}

choices!(CloudProvider);

/// Converts the settings.
pub(super) fn decide(node: &NodeSettings) -> NodeReports {
    let event_rate = std::num::NonZero::new(node.event_qps);
    NodeReports {
        max_images: node.node_status_max_images.0,
        event_rate: event_rate.map(|per_second| RequestRate { per_second, burst: node.event_burst }),
        has_external_cloud: node.cloud_provider == Some(CloudProvider::External),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::node_settings;
    use super::*;

    #[test]
    fn reports_have_the_kubelets_names_and_no_limit_of_events_by_default() {
        let of = |text: &str| decide(&node_settings(text).unwrap());
        let defaults = of("");
        assert_eq!((defaults.max_images, defaults.event_rate), (Some(50), None));
        assert!(!defaults.has_external_cloud);
        let set =
            of("node-status-max-images = -1\nevent-qps = 5\nevent-burst = 7\ncloud-provider = \"external\"");
        let rate = set.event_rate.map(|rate| (rate.per_second.get(), rate.burst.get()));
        assert_eq!((set.max_images, rate, set.has_external_cloud), (None, Some((5, 7)), true));
        for wrong in ["node-status-max-images = -2", "event-burst = 0", "cloud-provider = \"aws\""] {
            assert!(node_settings(wrong).is_err(), "{wrong}");
        }
    }
}
