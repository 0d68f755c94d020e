//! Runs the DNS server of the cluster at its addresses, which it adds to the loopback interface.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_dns::{IsPod, Metrics, Server, Upstream, Zone};
use coracle_error_chain::chain;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::config::DnsConfig;
use crate::service_cache::ServiceCache;

/// Port of DNS.
const PORT: u16 = 53;
/// First back-off after a failure. It doubles up to [`MAX_BACKOFF`]. It is reset if the server has run for longer than
/// [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// The task that serves DNS.
pub(crate) struct ClusterDns {
    config: DnsConfig,
    addresses: Vec<IpAddr>,
    domain: String,
    /// Record of the addresses, for their removal: the settings of a later command may differ.
    record: PathBuf,
    metrics: Arc<Metrics>,
}

// === impl ClusterDns ===

impl ClusterDns {
    /// A server of `domain` at these addresses.
    pub(crate) fn new(config: DnsConfig, addresses: &[IpAddr], domain: &str, run_dir: &Path) -> Self {
        let record = dns_record(run_dir);
        let (addresses, domain) = (addresses.to_vec(), domain.to_owned());
        Self { config, addresses, domain, record, metrics: Arc::default() }
    }

    /// Sets the counters of the server's queries and answers.
    pub(crate) fn with_metrics(self, metrics: Arc<Metrics>) -> Self {
        Self { metrics, ..self }
    }

    /// Serves until dropped. Names of the cluster are answered from the cache of services, even while the API server is
    /// unavailable.
    pub(crate) async fn run(self, services: ServiceCache, node: watch::Receiver<Option<Arc<Node>>>) {
        let (clients, permitted) = watch::channel(pod_networks(node.borrow().as_deref()));
        // `follow` returns only when the agent ends, so this method does not return before.
        tokio::join!(self.serve(services, permitted), follow(node, clients));
    }

    async fn serve(&self, services: ServiceCache, clients: watch::Receiver<Vec<IpNetwork>>) {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        let tables = services.tables();
        let is_pod: IsPod = Arc::new(move |address| services.has_pod(address));
        loop {
            let Some(zone) = Zone::new(&self.domain, Arc::clone(&tables), self.addresses.clone()) else {
                tracing::error!(
                    domain = self.domain,
                    "cluster DNS is off: the cluster domain is not a domain name"
                );
                return;
            };
            let upstream = Upstream::new(
                self.config.resolv_conf.clone(),
                self.addresses.clone(),
                &self.config.stub_domains,
                Arc::clone(&self.metrics),
            );
            let begin = Instant::now();
            let server = Server::new(zone, upstream, clients.clone()).with_pods(Arc::clone(&is_pod));
            if let Err(error) = self.attempt(server).await {
                tracing::warn!(error, "cluster DNS cannot be served, retrying");
            }
            tokio::time::sleep(delay_after(begin.elapsed(), &mut backoff)).await;
        }
    }

    async fn attempt(&self, server: Server) -> Result<(), String> {
        self.take_addresses().await?;
        let all: Vec<SocketAddr> =
            self.addresses.iter().map(|address| SocketAddr::new(*address, PORT)).collect();
        server.run(&all).await.map_err(|error| chain(&error))
    }

    /// Records the addresses, and adds them to the loopback interface.
    async fn take_addresses(&self) -> Result<(), String> {
        // The record is written before the addresses are added. So a process that is killed in between leaves no
        // unrecorded address.
        let text: String = self.addresses.iter().map(|address| format!("{address}\n")).collect();
        let record = self.record.clone();
        let written =
            coracle_threads::spawn_blocking(move || crate::private_file::replace(&record, text.as_bytes()));
        written.await.map_err(|error| chain(&error))?.map_err(|error| chain(&error))?;
        coracle_fault::point("cluster-dns.recorded");
        for address in &self.addresses {
            coracle_cni::add_host_address(*address).await.map_err(|error| chain(&error))?;
            coracle_fault::point("cluster-dns.address-added");
        }
        Ok(())
    }
}

/// The delay before the next attempt. `duration` is the duration of the attempt that ended.
fn delay_after(duration: Duration, backoff: &mut Backoff) -> Duration {
    if duration > MAX_BACKOFF {
        backoff.reset();
    }
    backoff.next_delay()
}

/// The record of the addresses that cluster DNS has on this node, one a line. Neither the record nor the addresses
/// survive a reboot.
#[must_use]
pub fn dns_record(run_dir: &Path) -> PathBuf {
    run_dir.join("cluster-dns")
}

async fn follow(mut node: watch::Receiver<Option<Arc<Node>>>, clients: watch::Sender<Vec<IpNetwork>>) {
    while node.changed().await.is_ok() {
        let now = pod_networks(node.borrow_and_update().as_deref());
        clients.send_if_modified(|known| {
            let differs = *known != now;
            *known = now;
            differs
        });
    }
}

/// Networks of the node's pods. Empty before the Node object has them.
fn pod_networks(node: Option<&Node>) -> Vec<IpNetwork> {
    let ranges = node.and_then(|node| node.spec.as_ref()).and_then(|spec| spec.pod_cidrs.as_ref());
    ranges.into_iter().flatten().filter_map(|range| range.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace, ip, killed_dir, run_until_killed_in};

    use super::*;

    /// Takes an address of each family.
    fn take_addresses(run_dir: &Path) {
        let config =
            DnsConfig { addresses: Vec::new(), resolv_conf: PathBuf::new(), stub_domains: Vec::new() };
        let addresses: [IpAddr; 2] = ["10.43.0.10", "fd43::a"].map(|address| address.parse().unwrap());
        let dns = ClusterDns::new(config, &addresses, "cluster.local", run_dir);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(dns.take_addresses()).unwrap();
    }

    #[test]
    fn the_next_agent_has_the_addresses_of_a_killed_one() {
        const TEST: &str = "cluster_dns::tests::the_next_agent_has_the_addresses_of_a_killed_one";
        if let Some(dir) = killed_dir() {
            return take_addresses(&dir);
        }
        in_new_namespace(|| {
            ip("link set lo up");
            let dir = tempfile::tempdir().unwrap();
            let held =
                || ["10.43.0.10/32", "fd43::a/128"].map(|address| ip("addr show dev lo").contains(address));
            for (point, left) in [
                ("cluster-dns.recorded", [false, false]),
                ("cluster-dns.address-added:1", [true, false]),
                ("cluster-dns.address-added:2", [true, true]),
            ] {
                run_until_killed_in(TEST, point, dir.path());
                let record = std::fs::read_to_string(dns_record(dir.path())).unwrap();
                assert_eq!(record, "10.43.0.10\nfd43::a\n", "{point}: addresses are recorded first");
                assert_eq!(held(), left, "{point}");
            }
            take_addresses(dir.path());
            assert_eq!(held(), [true, true]);
        });
    }

    #[test]
    fn the_back_off_is_reset_after_a_server_that_ran() {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        let delays = [(); 10].map(|()| delay_after(Duration::from_millis(3), &mut backoff));
        assert_eq!((delays[0], delays[9]), (FIRST_BACKOFF, MAX_BACKOFF), "the server could not start");
        assert_eq!(delay_after(Duration::from_secs(3600), &mut backoff), FIRST_BACKOFF);
    }
}
