//! Filters of packets from pods to their own node. Only policies of administrators apply to these packets.
//!
//! ```text
//! input ─► node-admin    ─ reply, related, neighbour discovery, query to cluster DNS ─► accept
//!                        ─ of a pod to an address that no policy can name            ─► drop
//!                        ─ from a pod with policies of administrators                ─► group ─► policies
//!       ─► node-baseline ─ the same, and from a pod with NetworkPolicies             ─► accept
//!                        ─ from a pod with baseline policies                         ─► group ─► policies
//! ```
//!
//! Each packet is compared with the policies, not only the first packet of a connection. So a changed policy applies to
//! open connections without a mark. The answers to probes are replies, because the node opens the connections.

use std::net::IpAddr;

use coracle_nft::{BaseChain, Header, Hook, Meta, R0, Rule, Transaction, octets};

use super::{ALLOWED, FIRST_PRIORITY, LINK_LOCAL, neighbour_discovery, registers, set_name};
use crate::program::Set;
use crate::rules::{Direction, Tier};

const ADMIN: &str = "node-admin";
const BASELINE: &str = "node-baseline";
const DNS_PORT: u16 = 53;
const TCP: u8 = 6;
const UDP: u8 = 17;
const SCTP: u8 = 132;

/// The node whose pods' packets are filtered.
#[derive(Clone, Debug, Default)]
pub struct OwnNode {
    /// Addresses of the cluster DNS that the node serves. All pods may send queries to them.
    pub dns: Vec<IpAddr>,
    /// Name of the bridge of the pods.
    pub bridge: Option<String>,
}

// === impl OwnNode ===

impl OwnNode {
    /// Makes the base chains. The sets of the tiers must exist.
    pub(super) fn make(&self, transaction: &mut Transaction<'_>) {
        for (name, priority) in [(ADMIN, FIRST_PRIORITY), (BASELINE, FIRST_PRIORITY + 1)] {
            transaction.make_base_chain(BaseChain { name, hook: Hook::Input, priority, kind: "filter" });
        }
        // The bit is cleared first, because another program may use it.
        transaction.rule(ADMIN, &Rule::default().clear_mark(ALLOWED));
        self.add_exceptions(transaction, ADMIN);
        self.add_unnamed(transaction);
        add_dispatch(transaction, ADMIN, Tier::Admin);
        transaction.rule(BASELINE, &Rule::default().marked(ALLOWED).clear_mark(ALLOWED).accept());
        self.add_exceptions(transaction, BASELINE);
        for is_ipv4 in [true, false] {
            // This set has the pods with NetworkPolicies. Baseline policies do not apply to them.
            let pod = Rule::of_family(is_ipv4).source(is_ipv4, R0).source(is_ipv4, R0 + registers(is_ipv4));
            transaction
                .rule(BASELINE, &pod.in_set(&set_name(Set::Itself(Direction::Egress, is_ipv4))).accept());
        }
        add_dispatch(transaction, BASELINE, Tier::Baseline);
    }

    /// Rules for packets that no policy may drop.
    fn add_exceptions(&self, transaction: &mut Transaction<'_>, name: &str) {
        transaction.rule(name, &Rule::default().replies().accept());
        transaction.rule(name, &Rule::default().related().accept());
        transaction.rule(name, &neighbour_discovery().accept());
        for (address, protocol) in self.dns.iter().flat_map(|address| [(address, UDP), (address, TCP)]) {
            let query = to(*address).meta(Meta::Transport, R0).equal(R0, &[protocol]);
            let query = query.payload(Header::Transport, 2, 2, R0).equal(R0, &DNS_PORT.to_be_bytes());
            transaction.rule(name, &query.accept());
        }
    }

    /// Rules that drop packets of pods to link-local addresses, and to other ports of cluster DNS. No policy names
    /// these addresses, but programs of the node listen on them, too.
    fn add_unnamed(&self, transaction: &mut Transaction<'_>) {
        let Some(bridge) = &self.bridge else { return };
        for protocol in [TCP, UDP, SCTP] {
            let of_pod = |rule: Rule| {
                let rule = rule.meta(Meta::InInterface, R0).equal(R0, &interface(bridge));
                rule.meta(Meta::Transport, R0).equal(R0, &[protocol]).drop()
            };
            let (first, last) = (LINK_LOCAL.0.octets(), LINK_LOCAL.1.octets());
            let from = Rule::of_family(false).source(false, R0).between(R0, &first, &last);
            let to_link_local = Rule::of_family(false).destination(false, R0).between(R0, &first, &last);
            transaction.rule(ADMIN, &of_pod(from));
            transaction.rule(ADMIN, &of_pod(to_link_local));
            self.dns.iter().for_each(|address| transaction.rule(ADMIN, &of_pod(to(*address))));
        }
    }
}

fn to(address: IpAddr) -> Rule {
    let is_ipv4 = address.is_ipv4();
    Rule::of_family(is_ipv4).destination(is_ipv4, R0).equal(R0, &octets(address))
}

/// Rules that send packets of the pods of a tier to their groups.
fn add_dispatch(transaction: &mut Transaction<'_>, name: &str, tier: Tier) {
    for is_ipv4 in [true, false] {
        let isolated = set_name(Set::Isolated(tier, Direction::Egress, is_ipv4));
        let pod = Rule::of_family(is_ipv4).source(is_ipv4, R0);
        transaction.rule(name, &pod.lookup_verdict(&isolated));
    }
}

/// The name of an interface as the kernel compares it: 16 bytes, filled with zeros.
fn interface(name: &str) -> [u8; 16] {
    let mut padded = [0u8; 16];
    for (to, from) in padded.iter_mut().zip(name.bytes().take(15)) {
        *to = from;
    }
    padded
}
