//! Service address ranges (CIDRs) of all ServiceCIDR objects.

use std::collections::BTreeMap;

use coracle_watch::Config;
use futures::StreamExt;
use ipnetwork::IpNetwork;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::Api;
use tokio::sync::watch;

use super::{Event, ServiceCache};

/// Maximum number of ranges in use. The first packet of each connection is compared with all of them.
const RANGES_MAX: usize = 64;

/// The ranges of each ServiceCIDR by its name.
#[derive(Debug, Default)]
struct Ranges {
    known: BTreeMap<String, Vec<IpNetwork>>,
    /// The ranges of a list that is being received.
    listed: BTreeMap<String, Vec<IpNetwork>>,
}

// === impl ServiceCache ===

impl ServiceCache {
    /// Sends the ranges of all ServiceCIDRs when they change, until dropped. Begins after the first list of services: a
    /// node may lack the right to read ServiceCIDRs, and pods do not wait for them. If the API server refuses the
    /// requests, they are repeated every five minutes.
    pub(crate) async fn watch_ranges(self, ranges: watch::Sender<Vec<IpNetwork>>) {
        let mut progress = self.changes();
        if progress.wait_for(|progress| progress.listed).await.is_err() {
            return;
        }
        let mut known = Ranges::default();
        let api: Api<ServiceCIDR> = Api::all(self.shared.client.clone());
        let mut events = coracle_watch::watch(api, Config::default().optional());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => known.apply(event),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::debug!(error, kind = "servicecidrs.networking.k8s.io", "a watch failed");
                    continue;
                }
            }
            let now = known.all();
            ranges.send_if_modified(|before| {
                let is_changed = *before != now;
                *before = now;
                is_changed
            });
        }
    }
}

// === impl Ranges ===

impl Ranges {
    fn apply(&mut self, event: Event<ServiceCIDR>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(cidr) => drop(self.listed.insert(name(&cidr), ranges(&cidr))),
            Event::InitDone => self.known = std::mem::take(&mut self.listed),
            Event::Apply(cidr) => drop(self.known.insert(name(&cidr), ranges(&cidr))),
            Event::Delete(cidr) => drop(self.known.remove(&name(&cidr))),
        }
    }

    /// All ranges, sorted.
    fn all(&self) -> Vec<IpNetwork> {
        let mut all: Vec<IpNetwork> = self.known.values().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        all.truncate(RANGES_MAX);
        all
    }
}

fn name(cidr: &ServiceCIDR) -> String {
    cidr.metadata.name.clone().unwrap_or_default()
}

/// The ranges of a ServiceCIDR. An invalid range is ignored.
fn ranges(cidr: &ServiceCIDR) -> Vec<IpNetwork> {
    let all = cidr.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
    all.filter_map(|range| range.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cidr(name: &str, ranges: &[&str]) -> ServiceCIDR {
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"cidrs": ranges}})).unwrap()
    }

    #[test]
    fn ranges_follow_the_service_cidrs() {
        let mut ranges = Ranges::default();
        let mut after = |event| {
            ranges.apply(event);
            ranges.all().iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let both = ["fd43::/112", "10.43.0.0/16", "x"];
        assert!(after(Event::Init).is_empty());
        assert!(after(Event::InitApply(cidr("kubernetes", &both))).is_empty(), "the list is not complete");
        assert_eq!(after(Event::InitDone), ["10.43.0.0/16", "fd43::/112"]);
        let more = after(Event::Apply(cidr("more", &["10.44.0.0/24", "10.43.0.0/16"])));
        assert_eq!(more, ["10.43.0.0/16", "10.44.0.0/24", "fd43::/112"]);
        assert_eq!(after(Event::Delete(cidr("kubernetes", &both))), ["10.43.0.0/16", "10.44.0.0/24"]);
        let relist = [Event::Init, Event::InitApply(cidr("kubernetes", &both[..1]))];
        relist.into_iter().for_each(|event| assert_eq!(after(event).len(), 2));
        assert_eq!(after(Event::InitDone), ["fd43::/112"], "a list replaces all");
    }

    #[test]
    fn more_ranges_than_the_maximum_are_not_used() {
        let mut ranges = Ranges::default();
        for number in 0..=RANGES_MAX {
            ranges.apply(Event::Apply(cidr(&number.to_string(), &[format!("10.43.{number}.0/24").as_str()])));
        }
        assert_eq!(ranges.all().len(), RANGES_MAX);
    }
}
