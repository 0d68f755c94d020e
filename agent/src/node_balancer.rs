//! Checks load balancers before this node serves them at its addresses. No service takes a port that a program of the
//! node or a pod's host port uses.
//!
//! The control plane's controller decides which service has which port of the nodes. The controller has no list of a
//! node's sockets. So the node checks each service itself, never serves a refused service, and names refused ports in
//! an annotation. The controller then removes the node's address from the status.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_error_chain::chain;
use coracle_services::ServiceState;
use coracle_values::CollectMap;
use coracle_values::object::Key;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::deadline::until;
use crate::event_recorder::Recorder;
use crate::pod::NodeContext;
use crate::pod::admit::in_use::{self, Sockets};

/// The class of load balancers that nodes serve, besides load balancers without a class.
const CLASS: &str = "coracle.dev/node-addresses";
/// Annotation of a node: ports that the node refuses to serve, as in `TCP/80,UDP/53`. The controller reads it.
const REFUSED: &str = "coracle.dev/refused-load-balancer-ports";
/// Maximum ports in the annotation.
const REFUSED_MAX: usize = 256;
/// Time after which refused services are checked again.
const RETRY: Duration = Duration::from_secs(60);
/// First back-off after a failed write of the annotation. It doubles with each failure, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Protocol and number.
type Port = (String, u16);

/// Checks load balancers.
pub(crate) struct NodeBalancer {
    node: Arc<NodeContext>,
    checks: Mutex<Checks>,
    /// The refused ports. None before the first complete check.
    refused: watch::Sender<Option<BTreeSet<Port>>>,
}

/// The results of checks.
#[derive(Debug, Default)]
struct Checks {
    services: BTreeMap<Key, Check>,
    /// The services with refused ports, so that the end of a transaction need not visit all services.
    refused: BTreeSet<Key>,
    /// Sockets of the node, listed once for all services of one transaction.
    sockets: Sockets,
    /// Time of the next check of refused services.
    retry: Option<Instant>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Check {
    /// The uid and the ports of the checked service. The service is checked again only if one of them changes.
    uid: Option<String>,
    ports: BTreeSet<Port>,
    /// Ports in use, each with the program or pod that uses it.
    refused: BTreeMap<Port, String>,
}

// === impl NodeBalancer ===

impl NodeBalancer {
    pub(crate) fn new(node: Arc<NodeContext>) -> Self {
        Self { node, checks: Mutex::default(), refused: watch::Sender::default() }
    }

    /// The recorder of the node's events.
    pub(crate) fn recorder(&self) -> &Recorder {
        &self.node.recorder
    }

    fn lock(&self) -> MutexGuard<'_, Checks> {
        self.checks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The service in the form in which the proxy may program it: a refused service has no addresses of nodes. Blocks
    /// while the kernel lists sockets.
    pub(crate) fn permit(
        &self,
        key: &Key,
        state: Option<ServiceState>,
        addresses: &[IpAddr],
    ) -> Option<ServiceState> {
        let checked_state = state.clone().filter(|state| is_checked(&state.service));
        let Some(ServiceState { service, slices }) = checked_state else {
            self.lock().remove(key);
            return state;
        };
        let mut checks = self.lock();
        let Checks { services, sockets, .. } = &mut *checks;
        let (config, pods) = (&self.node.config, &self.node.pods);
        let own = in_use::own_ports(config);
        // The host ports are listed once, and only if the service is checked: services and pods can have very many
        // ports.
        let all = LazyCell::new(|| pods.host_ports());
        let host_ports = LazyCell::new(|| in_use::host_ports_at(&all, addresses));
        let user = |port: (&str, u16)| match host_ports.contains(&(port.0, i32::from(port.1))) {
            true => Ok(Some("a host port of a pod".to_owned())),
            false => sockets.program_at(&own, port.0, port.1, addresses),
        };
        let (check, is_new) = checked(services.get(key), &service, user);
        let is_refused = !check.refused.is_empty();
        if is_new && is_refused {
            let all: Vec<String> = check
                .refused
                .iter()
                .map(|((protocol, port), user)| format!("port {port}/{protocol} is in use by {user}"))
                .collect();
            let message =
                format!("node {} does not serve this service: {}", config.node_name, all.join(", "));
            self.node.recorder.service(&service, "LoadBalancerPortInUse", message);
        }
        checks.put(key, check);
        drop(checks);
        let service = if is_refused { Arc::new(without_nodes(&service)) } else { service };
        Some(ServiceState { service, slices })
    }

    /// Ends a transaction. The checks of the next transaction list the sockets again.
    pub(crate) fn end_transaction(&self) {
        let mut checks = self.lock();
        checks.sockets = Sockets::default();
        let refused = checks.refused_ports();
        if refused.is_empty() {
            checks.retry = None;
        } else {
            checks.retry.get_or_insert_with(|| Instant::now() + RETRY);
        }
        self.refused.send_if_modified(|known| {
            let is_changed = known.as_ref() != Some(&refused);
            *known = Some(refused);
            is_changed
        });
    }

    /// Discards all results, so that each service is checked again.
    pub(crate) fn withdraw(&self) {
        let mut checks = self.lock();
        checks.services.values_mut().for_each(|check| check.ports.clear());
        checks.sockets = Sockets::default();
    }

    /// Waits until refused services are due for another check. Cancel safe.
    pub(crate) async fn retry_is_due(&self) {
        let due = self.lock().retry;
        until(due).await;
    }

    /// Discards the results of refused services. Returns their keys.
    pub(crate) fn forget_refused(&self) -> Vec<Key> {
        let mut checks = self.lock();
        checks.retry = None;
        let refused: Vec<Key> = checks.refused.iter().cloned().collect();
        for key in &refused {
            if let Some(check) = checks.services.get_mut(key) {
                check.ports.clear();
            }
        }
        refused
    }

    /// Keeps the annotation of the Node object up to date, until dropped.
    pub(crate) async fn publish(self: Arc<Self>, mut node: watch::Receiver<Option<Arc<Node>>>) {
        let mut refused = self.refused.subscribe();
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            let desired = refused.borrow_and_update().as_ref().map(text);
            let observed = node.borrow_and_update().clone();
            let patch = desired.zip(observed).and_then(|(desired, observed)| patch(&desired, &observed));
            let api: Api<Node> = Api::all(self.node.configs.client().clone());
            let name = &self.node.config.node_name;
            let written = match patch {
                Some(patch) => api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop),
                None => Ok(()),
            };
            if let Err(error) = written {
                tracing::warn!(
                    error = chain(&error),
                    "cannot write the refused ports of load balancers, retrying"
                );
                tokio::time::sleep(backoff.next_delay()).await;
                continue;
            }
            backoff.reset();
            // Both arms are cancel-safe: a change stays marked until it is read.
            tokio::select! {
                changed = refused.changed() => if changed.is_err() { return },
                changed = node.changed() => if changed.is_err() { return },
            }
        }
    }
}

// === impl Checks ===

impl Checks {
    fn put(&mut self, key: &Key, check: Check) {
        if check.refused.is_empty() {
            self.refused.remove(key);
        } else {
            self.refused.insert(key.clone());
        }
        self.services.insert(key.clone(), check);
    }

    fn remove(&mut self, key: &Key) {
        self.services.remove(key);
        self.refused.remove(key);
    }

    fn refused_ports(&self) -> BTreeSet<Port> {
        let refused = self.refused.iter().filter_map(|key| self.services.get(key));
        refused.flat_map(|check| check.refused.keys().cloned()).collect()
    }
}

/// Whether a service may be served at the addresses of nodes: the controller serves its class, or its status has an
/// entry of a node. Such an entry could outlive a change of the class.
pub(crate) fn is_checked(service: &Service) -> bool {
    let Some(spec) = service.spec.as_ref().filter(|spec| spec.type_.as_deref() == Some("LoadBalancer"))
    else {
        return false;
    };
    let is_ours = spec.load_balancer_class.as_deref().is_none_or(|class| class == CLASS);
    is_ours || ingress(service).any(is_of_node)
}

/// The entries of a service's status.
fn ingress(service: &Service) -> impl Iterator<Item = &LoadBalancerIngress> {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    balancer.and_then(|balancer| balancer.ingress.as_ref()).into_iter().flatten()
}

/// Whether an entry may be the address of a node. Other entries are virtual addresses of other load balancers.
fn is_of_node(entry: &LoadBalancerIngress) -> bool {
    entry.ip_mode.as_deref() == Some("Proxy")
}

/// The result of the check, and whether it differs from the previous result.
fn checked(
    known: Option<&Check>,
    service: &Service,
    mut user: impl FnMut((&str, u16)) -> io::Result<Option<String>>,
) -> (Check, bool) {
    let ports = service.spec.iter().flat_map(|spec| spec.ports.iter().flatten()).filter_map(|port| {
        let protocol = port.protocol.clone().unwrap_or_else(|| "TCP".to_owned());
        Some((protocol, u16::try_from(port.port).ok()?))
    });
    let ports: BTreeSet<Port> = ports.collect();
    let uid = service.metadata.uid.clone();
    if let Some(known) = known.filter(|known| known.uid == uid && known.ports == ports) {
        return (known.clone(), false);
    }
    let used = ports.iter().filter_map(|port| {
        let user = user((&port.0, port.1));
        // If the kernel does not list its sockets, the port counts as used.
        let user = user.unwrap_or_else(|error| Some(format!("an unknown program: {error}")));
        Some((port.clone(), user?))
    });
    let check = Check { uid, refused: used.collect_map(), ports };
    let is_new = known.is_none_or(|known| known.refused != check.refused || known.uid != check.uid);
    (check, is_new)
}

/// The service without the addresses of nodes.
fn without_nodes(service: &Service) -> Service {
    let mut service = service.clone();
    let balancer = service.status.as_mut().and_then(|status| status.load_balancer.as_mut());
    if let Some(ingress) = balancer.and_then(|balancer| balancer.ingress.as_mut()) {
        ingress.retain(|entry| !is_of_node(entry));
    }
    service
}

fn text(ports: &BTreeSet<Port>) -> String {
    let all: Vec<String> =
        ports.iter().take(REFUSED_MAX).map(|(protocol, port)| format!("{protocol}/{port}")).collect();
    all.join(",")
}

/// The merge patch of the annotation. None if the node has the desired text. An empty text removes the annotation.
fn patch(desired: &str, observed: &Node) -> Option<serde_json::Value> {
    let current = observed.metadata.annotations.as_ref().and_then(|all| all.get(REFUSED));
    let desired = Some(desired).filter(|text| !text.is_empty());
    (current.map(String::as_str) != desired).then(|| json!({"metadata": {"annotations": {REFUSED: desired}}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(uid: &str, ports: &[u16]) -> Service {
        let ports: Vec<_> = ports.iter().map(|port| json!({"port": port, "protocol": "TCP"})).collect();
        let ingress = json!([{"ip": "192.0.2.1", "ipMode": "Proxy"}]);
        serde_json::from_value(
            json!({"metadata": {"uid": uid}, "spec": {"type": "LoadBalancer", "ports": ports},
            "status": {"loadBalancer": {"ingress": ingress}}}),
        )
        .unwrap()
    }

    #[test]
    fn a_used_port_refuses_the_service_until_it_changes() {
        let sshd = |(_, port): (&str, u16)| Ok((port == 8080).then(|| "sshd (process 7)".to_owned()));
        let (busy, is_new) = checked(None, &service("1", &[80, 8080]), sshd);
        assert!(is_new && busy.refused.len() == 1, "{busy:?}");
        let unused = |_: (&str, u16)| -> io::Result<Option<String>> { panic!("checked again") };
        assert_eq!(checked(Some(&busy), &service("1", &[80, 8080]), unused), (busy.clone(), false));
        let (free, _) = checked(Some(&busy), &service("1", &[80]), sshd);
        assert!(free.refused.is_empty());
        let (other, is_new) = checked(Some(&busy), &service("2", &[80, 8080]), sshd);
        assert!(is_new && !other.refused.is_empty(), "another service of this name");
    }

    #[test]
    fn only_services_with_refused_ports_are_visited_after_a_transaction() {
        let mut checks = Checks::default();
        let mut ports_after = |name: &str, refused: Option<&[u16]>| {
            let key = Key::new("n", name);
            match refused {
                Some(all) => {
                    let refused = all.iter().map(|port| (("TCP".to_owned(), *port), "sshd".to_owned()));
                    checks.put(&key, Check { refused: refused.collect(), ..Check::default() });
                }
                None => checks.remove(&key),
            }
            let ports: Vec<u16> = checks.refused_ports().into_iter().map(|(_, port)| port).collect();
            (checks.refused.len(), ports)
        };
        assert_eq!(ports_after("a", Some(&[])), (0, vec![]));
        assert_eq!(ports_after("b", Some(&[80, 81])), (1, vec![80, 81]));
        assert_eq!(ports_after("c", Some(&[81])), (2, vec![80, 81]));
        assert_eq!(ports_after("b", Some(&[])), (1, vec![81]));
        assert_eq!(ports_after("c", None), (0, vec![]));
    }

    #[test]
    fn without_a_list_of_sockets_no_port_is_served() {
        let (check, _) = checked(None, &service("1", &[80]), |_| Err(io::Error::other("no netlink")));
        assert_eq!(check.refused.len(), 1);
        let mut both = service("1", &[80]);
        both.spec.as_mut().unwrap().load_balancer_class = Some("example.com/other".to_owned());
        let virtual_one = LoadBalancerIngress { ip: Some("192.0.2.9".to_owned()), ..Default::default() };
        let balancer = both.status.as_mut().unwrap().load_balancer.as_mut().unwrap();
        balancer.ingress.as_mut().unwrap().push(virtual_one.clone());
        assert!(is_checked(&both), "the status has an address of a node");
        let left = without_nodes(&both);
        assert_eq!(ingress(&left).collect::<Vec<_>>(), [&virtual_one]);
        assert!(!is_checked(&left));
    }

    #[test]
    fn refused_ports_are_an_annotation_of_the_node() {
        let node = |text: Option<&str>| Node {
            metadata: kube::api::ObjectMeta {
                annotations: text.map(|text| [(REFUSED.to_owned(), text.to_owned())].into()),
                ..Default::default()
            },
            ..Node::default()
        };
        let ports: BTreeSet<Port> = [("UDP".to_owned(), 53), ("TCP".to_owned(), 80)].into();
        let wanted = text(&ports);
        assert_eq!(wanted, "TCP/80,UDP/53");
        assert!(patch(&wanted, &node(Some(&wanted))).is_none() && patch("", &node(None)).is_none());
        let removed = patch("", &node(Some(&wanted))).unwrap();
        assert!(removed["metadata"]["annotations"][REFUSED].is_null());
        assert_eq!(patch(&wanted, &node(None)).unwrap()["metadata"]["annotations"][REFUSED], wanted.as_str());
    }
}
