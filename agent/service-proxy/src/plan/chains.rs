//! The chains of one service port: their names and rules.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use coracle_nft::{AnonymousMap, DataType, R0, Rule, Value, Verdict};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Service;

use super::{NodeView, Port};
use crate::endpoints::{Target, TrafficEndpoints};
use crate::layout::{MASQUERADE, masquerade_outside, target_type};
use crate::program::{Affinity, Program};

/// The chains of one service port in one family. Their names show the service to readers of `nft list ruleset`.
pub(super) struct Chains {
    base: String,
    is_ipv4: bool,
}

// === impl Chains ===

impl Chains {
    pub(super) fn new(service: &Service, port: &Port<'_>) -> Self {
        let meta = &service.metadata;
        let part = |text: Option<&str>| permitted_name(text.unwrap_or_default());
        let (namespace, name) = (part(meta.namespace.as_deref()), part(meta.name.as_deref()));
        let family = if port.is_ipv4 { 4 } else { 6 };
        // The name of a chain has at most 255 bytes. So it contains the protocol and the number of the port, and not
        // the port's name.
        let base = format!("{namespace}/{name}/{}-{}/{family}", port.protocol, port.number);
        Self { base, is_ipv4: port.is_ipv4 }
    }

    pub(super) fn external(&self) -> String {
        format!("external {}", self.base)
    }

    pub(super) fn guard(&self) -> String {
        format!("guard {}", self.base)
    }

    fn family(&self) -> u8 {
        if self.is_ipv4 { 2 } else { 10 }
    }

    fn registers(&self) -> u32 {
        DataType::address(self.is_ipv4).length / 4
    }

    /// Makes the chain that chooses one of the targets. Returns its name.
    pub(super) fn make_balancing(
        &self,
        program: &mut Program,
        targets: &[Target],
        affinity: Option<Duration>,
        is_local: bool,
    ) -> String {
        let chain = format!("{} {}", if is_local { "local" } else { "cluster" }, self.base);
        #[cfg(test)]
        program.targets.insert(chain.clone(), targets.iter().copied().collect());
        let rules = match affinity {
            None => vec![self.translate(targets)],
            Some(timeout) => self.with_affinity(program, targets, timeout),
        };
        program.chains.insert(chain.clone(), rules);
        chain
    }

    /// Makes the chain for packets to the cluster IPs, which goes to a balancing chain. Returns its name.
    pub(super) fn make_internal(&self, program: &mut Program, balancing: &str, node: &NodeView) -> String {
        let chain = format!("internal {}", self.base);
        #[cfg(test)]
        if let Some(targets) = program.targets.get(balancing).cloned() {
            program.targets.insert(chain.clone(), targets);
        }
        let outside = masquerade_outside(self.is_ipv4, node);
        let rules = outside.into_iter().chain([Rule::default().goto(balancing)]).collect();
        program.chains.insert(chain.clone(), rules);
        chain
    }

    /// Chooses a random target and translates the destination to it.
    fn translate(&self, targets: &[Target]) -> Rule {
        let rule = match targets {
            [one] => {
                let rule = Rule::default().immediate(R0, &octets(*one));
                rule.immediate(R0 + self.registers(), &one.port.to_be_bytes())
            }
            all => {
                let value = target_type(self.is_ipv4);
                let targets = all.iter().map(|target| Value::Target(target.address, target.port));
                let count = u32::try_from(all.len()).unwrap_or(u32::MAX);
                Rule::default().random(count, R0).lookup_in(AnonymousMap::choice(Some(value), targets))
            }
        };
        rule.destination_nat(self.family(), self.registers())
    }

    /// Sends a known client to its target, and other clients to a random target. Each target has a set of its clients,
    /// which is kept when other targets are added and removed.
    fn with_affinity(&self, program: &mut Program, targets: &[Target], timeout: Duration) -> Vec<Rule> {
        let client = || Rule::default().source(self.is_ipv4, R0);
        let mut rules = Vec::with_capacity(targets.len() + 1);
        let mut chains = Vec::with_capacity(targets.len());
        for target in targets {
            let end = format!("{}/{}/{}", self.base, target.address, target.port);
            let (chain, set) = (format!("to {end}"), format!("clients {} {end}", timeout.as_secs()));
            rules.push(client().in_set(&set).goto(&chain));
            // A rule that adds to a full set does not match, so the translation is a separate rule.
            let to_target = vec![client().update(&set), self.translate(&[*target])];
            program.affinities.insert(set, Affinity { is_ipv4: self.is_ipv4, timeout });
            program.chains.insert(chain.clone(), to_target);
            chains.push(Value::Verdict(Verdict::Goto(chain)));
        }
        let count = u32::try_from(chains.len()).unwrap_or(u32::MAX);
        rules.push(Rule::default().random(count, R0).lookup_in(AnonymousMap::choice(None, chains)));
        rules
    }

    /// Makes the chain for packets to external addresses and node ports. `local` is set if the traffic policy is
    /// `Local`.
    pub(super) fn make_external(
        &self,
        program: &mut Program,
        choice: &TrafficEndpoints,
        affinity: Option<Duration>,
        local: Option<&NodeView>,
    ) {
        let mut rules = Vec::new();
        let masquerade = || Rule::default().set_mark(MASQUERADE);
        let to_cluster = (!choice.cluster.is_empty())
            .then(|| self.make_balancing(program, &choice.cluster, affinity, false));
        match (local, to_cluster) {
            (None, None) => rules.push(Rule::default().drop()),
            (None, Some(cluster)) => rules.extend([masquerade(), Rule::default().goto(&cluster)]),
            (Some(node), cluster) => {
                // Pods and processes of this node reach all endpoints, as if they used the cluster IP.
                if let Some(cluster) = cluster {
                    let pods = node.pod_networks.iter().filter(|net| net.is_ipv4() == self.is_ipv4);
                    rules.extend(pods.map(|net| Rule::default().from(*net, false).goto(&cluster)));
                    rules.push(Rule::default().source_is_local().set_mark(MASQUERADE));
                    rules.push(Rule::default().source_is_local().goto(&cluster));
                }
                rules.push(match choice.local.is_empty() {
                    // The node has no local endpoint. Its health check reports that to load balancers.
                    true => Rule::default().drop(),
                    false => {
                        Rule::default().goto(&self.make_balancing(program, &choice.local, affinity, true))
                    }
                });
            }
        }
        program.chains.insert(self.external(), rules);
    }

    /// Makes the chain that drops packets from sources outside `loadBalancerSourceRanges`.
    pub(super) fn make_guard(&self, program: &mut Program, sources: &[IpNetwork]) {
        let mut rules: Vec<Rule> = sources
            .iter()
            .filter(|range| range.is_ipv4() == self.is_ipv4)
            .map(|range| Rule::default().from(*range, false).verdict(&Verdict::Return))
            .collect();
        rules.push(Rule::default().drop());
        program.chains.insert(self.guard(), rules);
    }
}

fn octets(target: Target) -> Vec<u8> {
    match target.address {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// The name if the API permits it, otherwise a hash of the name.
fn permitted_name(name: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if !name.is_empty() && name.len() <= 63 && name.bytes().all(is_plain) {
        return name.to_owned();
    }
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    format!("_{:016x}", hasher.finish())
}
