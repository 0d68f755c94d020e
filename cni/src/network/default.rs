//! The default network, used without a configuration: a bridge, addresses from the node's ranges, host ports and
//! bandwidth limits. It is a list of our own plugins.

use std::sync::Arc;

use futures::future::BoxFuture;
use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::{Network, NetworkConfig, State};
use crate::error::Error;
use crate::firewall::{Claim, Firewall};
use crate::host_local::range::{RangeConf, RangeSet};
use crate::link::Bridge;
use crate::spec::list::List;
use crate::sysctl;

/// Name of the list and of its directory of addresses.
pub(super) const NAME: &str = "coracle";
pub(super) const NO_RANGE: &str = "no pod address range is set";

impl Network {
    /// Sets the node's pod ranges. Without a configured network, this makes the default network: the bridge with the
    /// first address of each range as gateway, forwarding, and the firewall table. A repeated call with the same
    /// ranges repairs the network.
    ///
    /// # Errors
    /// When a range is too small or the kernel fails.
    pub async fn set_pod_cidrs(&self, cidrs: Vec<IpNetwork>) -> Result<(), Error> {
        let mut state = self.inner.state.write().await;
        state.cidrs = cidrs;
        if state.configured { Ok(()) } else { self.install_default(&mut state).await }
    }

    /// Sets the destination ranges without masquerading, such as the ranges of other nodes' pods. Packets of pods to
    /// these ranges keep their source address. Until the first call, the ranges of the previous process remain.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn set_unmasqueraded(&self, ranges: Vec<IpNetwork>) -> Result<(), Error> {
        if self.inner.state.read().await.unmasqueraded == ranges {
            return Ok(());
        }
        let mut state = self.inner.state.write().await;
        let before = std::mem::replace(&mut state.unmasqueraded, ranges);
        if state.list.is_none() || state.configured {
            return Ok(());
        }
        let done = self.inner.host.firewall.put(&claim(&state));
        if done.is_err() {
            state.unmasqueraded = before;
        }
        done
    }

    /// Sets the MTU of the default network's bridge and of all its pods. It overrides the configured MTU. `None`
    /// restores the configured MTU.
    ///
    /// # Errors
    /// When the kernel fails. The call can be repeated.
    pub async fn set_mtu(&self, mtu: Option<u32>) -> Result<(), Error> {
        let made = |state: &State| state.list.is_some() && !state.configured;
        // Usually nothing changes. Then the lock is taken only for reading.
        let nothing_to_do = |state: &State| state.mtu == mtu && !(state.mtu_is_new && made(state));
        if nothing_to_do(&*self.inner.state.read().await) {
            return Ok(());
        }
        let mut state = self.inner.state.write().await;
        state.mtu_is_new |= state.mtu != mtu;
        state.mtu = mtu;
        let made = made(&state);
        if state.mtu_is_new && made { self.install_default(&mut state).await } else { Ok(()) }
    }

    /// Makes the default network if its ranges are known.
    pub(super) async fn install_default(&self, state: &mut State) -> Result<(), Error> {
        state.configured = false;
        if state.cidrs.is_empty() {
            state.list = None;
            self.set_ready(Err(NO_RANGE.to_owned()));
            return Ok(());
        }
        let made = self.make_default(state).await;
        self.set_ready(made.as_ref().map(|_| Vec::new()).map_err(Error::chain));
        state.list = Some(Arc::new(made?));
        let derived = self.derive(state).await;
        let done = match state.mtu.or(self.inner.config.mtu) {
            Some(mtu) => derived.and(self.resize_pods(mtu).await),
            None => derived,
        };
        state.mtu_is_new &= done.is_err();
        done
    }

    /// Makes the bridge and the firewall table. The future is boxed, so that it is compiled once, in this crate.
    fn make_default<'a>(&'a self, state: &'a State) -> BoxFuture<'a, Result<List, Error>> {
        Box::pin(self.make_bridge(state))
    }

    async fn make_bridge(&self, state: &State) -> Result<List, Error> {
        let (config, host) = (&self.inner.config, &self.inner.host);
        let mtu = state.mtu.or(config.mtu);
        let gateways = state.cidrs.iter().map(|cidr| gateway(*cidr)).collect::<Result<Vec<_>, _>>()?;
        self.claim_bridge(&gateways).await?;
        let wanted = Bridge { mtu, ours: true, ..Bridge::default() };
        let (bridge, _) = host.links.ensure_bridge(&config.bridge, wanted).await?;
        if !host.links.filter_bridge(&config.bridge).await? {
            tracing::warn!(
                bridge = config.bridge,
                "packets between pods of this node are not filtered, so network policies have no effect between them: \
                 load the kernel module br_netfilter"
            );
        }
        sysctl::forwarding(&state.cidrs)?;
        sysctl::room_for_neighbours();
        coracle_fault::point("recover.bridge");
        host.links.ensure_addresses(&bridge, &gateways).await?;
        coracle_fault::point("recover.bridge-addressed");
        if !host.firewall.opens(&config.bridge) {
            // An earlier version left this sysctl enabled.
            sysctl::route_localnet(&config.bridge, false)?;
        }
        host.firewall.put(&claim(state))?;
        coracle_fault::point("recover.network-ranges");
        host.firewall.repair()?;
        sysctl::room_for_connections();
        if let Some(connections) = &host.connections {
            connections.make(&config.bridge, &state.cidrs);
        }
        let wrong = |reason: String| Error::invalid("the default network", reason);
        List::parse(list(config, mtu, &state.cidrs)).map_err(wrong)
    }

    /// Marks the bridge as ours if it has these addresses or the addresses of the last record.
    pub(super) async fn claim_bridge(&self, gateways: &[IpNetwork]) -> Result<(), Error> {
        let (config, host) = (&self.inner.config, &self.inner.host);
        let earlier = host.firewall.get(&claim(&State::default())).map(|claim| claim.masquerade);
        let earlier = earlier.into_iter().flatten().filter_map(|cidr| gateway(cidr).ok());
        let gateways: Vec<IpNetwork> = gateways.iter().copied().chain(earlier).collect();
        host.links.claim_bridge(&config.bridge, &gateways).await
    }

    /// Removes the firewall claim of the default network, because another network replaces the default network.
    pub(super) fn drop_default(&self) -> Result<(), Error> {
        let host = &self.inner.host;
        let connections = host.connections.as_ref().map_or(Ok(()), |connections| connections.clear());
        host.firewall.remove(&claim(&State::default())).and(connections)
    }
}

/// The ranges without masquerading in the recorded claim.
pub(super) fn unmasqueraded(firewall: &Firewall) -> Vec<IpNetwork> {
    let Some(claim) = firewall.get(&claim(&State::default())) else { return Vec::new() };
    claim.except.into_iter().filter(|range| !claim.masquerade.contains(range)).collect()
}

/// Claim of the network itself: masquerading of its ranges, independent of attachments.
fn claim(state: &State) -> Claim {
    Claim {
        plugin: "network".to_owned(),
        network: NAME.to_owned(),
        masquerade: state.cidrs.clone(),
        except: state.cidrs.iter().chain(&state.unmasqueraded).copied().collect(),
        ..Claim::default()
    }
}

/// The first address of a range, which the bridge has.
fn gateway(cidr: IpNetwork) -> Result<IpNetwork, Error> {
    let set = RangeSet::new(
        0,
        vec![RangeConf { subnet: cidr, range_start: None, range_end: None, gateway: None }],
    )?;
    let gateway = set.gateway().unwrap_or_else(|| cidr.ip());
    IpNetwork::new(gateway, cidr.prefix()).map_err(|_not| Error::RangeTooSmall { range: cidr })
}

fn list(config: &NetworkConfig, mtu: Option<u32>, cidrs: &[IpNetwork]) -> Value {
    let ranges: Vec<Value> = cidrs.iter().map(|cidr| json!([{"subnet": cidr}])).collect();
    json!({
        "cniVersion": "1.1.0",
        "name": NAME,
        "plugins": [
            {
                "type": "bridge",
                "bridge": config.bridge,
                "coracle": {"ours": true},
                "capabilities": {"ips": true, "mac": true},
                "mtu": mtu.unwrap_or(0),
                "isDefaultGateway": true,
                "hairpinMode": true,
                "ipam": {"type": "host-local", "dataDir": config.state_dir.join("networks"), "ranges": ranges},
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        ],
    })
}
