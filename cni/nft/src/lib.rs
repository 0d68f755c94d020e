//! nftables over netlink: tables, chains, rules, sets, maps, transactions, dumps and notifications; and the removal of
//! conntrack entries, which use the same socket family.
//!
//! Start at [`Transaction`], which collects changes of one table, and [`Channel`], which commits them. The crate has
//! no types of pods, host ports or Services. Each user has its own table or its own chains.
//!
//! Invariants:
//! - a [`Transaction`] is applied completely or not at all;
//! - a read stops at the first incomplete message; no length from the kernel is trusted.

mod data;
mod dump;
mod element;
mod error;
mod event;
mod expression;
mod flow;
mod interval;
mod message;
mod transaction;
mod watch;

pub use data::{DataType, INET_PROTO, INET_SERVICE, IPV4_ADDR, IPV6_ADDR, MARK, Verdict, octets};
pub use dump::{counted_packets, dynamic_elements};
pub use element::{Element, Key, Value};
pub use error::TableError;
pub use event::{Change, changes};
pub use expression::{AnonymousMap, Header, Hook, Meta, R0, Rule};
pub use flow::{Flow, FlowSelector, MarkCounts, count_flows, delete_flows, mark_flows};
pub use interval::{Interval, intervals};
pub use message::{
    Attributes, BODY, BRIDGE, Batch, Channel, INET, NLMSG_ERROR, Verb, attributes, errno_of, kind_of,
    messages, number_of,
};
pub use transaction::{BaseChain, SetSpec, Transaction};
pub use watch::Monitor;
