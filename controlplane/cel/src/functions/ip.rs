//! IP addresses and networks.

use std::net::IpAddr;

use coracle_values::names::has_prefix_length;
use ipnetwork::IpNetwork;

use super::{failed, traversal};
use crate::cost_meter::CostMeter;
use crate::eval_error::Evaluated;
use crate::value::Value;

pub(super) fn call<'a>(
    meter: &mut CostMeter,
    name: &str,
    args: &[Value<'a>],
    _member: bool,
) -> Option<Evaluated<'a>> {
    let cost = traversal(args.first()?.cost_size()).max(1);
    let result = match (name, args) {
        ("ip", [Value::String(text)]) => address(text).map(Value::Ip).map_or_else(failed, Ok),
        ("isIP", [Value::String(text)]) => Ok(Value::Bool(address(text).is_ok())),
        ("ip.isCanonical", [Value::String(text)]) => match address(text) {
            Ok(address) => Ok(Value::Bool(address.to_string() == **text)),
            Err(error) => failed(error),
        },
        ("cidr", [Value::String(text)]) => network(text).map(Value::Cidr).map_or_else(failed, Ok),
        ("isCIDR", [Value::String(text)]) => Ok(Value::Bool(network(text).is_ok())),
        ("family", [Value::Ip(address)]) => Ok(Value::Int(if address.is_ipv4() { 4 } else { 6 })),
        ("isUnspecified", [Value::Ip(address)]) => Ok(Value::Bool(address.is_unspecified())),
        ("isLoopback", [Value::Ip(address)]) => Ok(Value::Bool(address.is_loopback())),
        ("isLinkLocalMulticast", [Value::Ip(address)]) => Ok(Value::Bool(is_link_local_multicast(address))),
        ("isLinkLocalUnicast", [Value::Ip(address)]) => Ok(Value::Bool(is_link_local(address))),
        ("isGlobalUnicast", [Value::Ip(address)]) => Ok(Value::Bool(is_global_unicast(address))),
        ("ip", [Value::Cidr(network)]) => Ok(Value::Ip(network.ip())),
        ("masked", [Value::Cidr(network)]) => IpNetwork::new(network.network(), network.prefix())
            .map_or_else(|error| failed(error.to_string()), |it| Ok(Value::Cidr(it))),
        ("prefixLength", [Value::Cidr(network)]) => Ok(Value::Int(network.prefix().into())),
        ("containsIP", [Value::Cidr(network), Value::Ip(address)]) => {
            Ok(Value::Bool(network.contains(*address)))
        }
        ("containsIP", [Value::Cidr(network), Value::String(text)]) => match address(text) {
            Ok(address) => Ok(Value::Bool(network.contains(address))),
            Err(error) => failed(error),
        },
        ("containsCIDR", [Value::Cidr(outer), Value::Cidr(inner)]) => Ok(Value::Bool(covers(outer, inner))),
        ("containsCIDR", [Value::Cidr(outer), Value::String(text)]) => match network(text) {
            Ok(inner) => Ok(Value::Bool(covers(outer, &inner))),
            Err(error) => failed(error),
        },
        _ => return None,
    };
    Some(meter.charge(cost).and(result))
}

fn address(text: &str) -> Result<IpAddr, String> {
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(address)) if address.to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"))
        }
        Ok(address) => Ok(address),
        Err(_) => Err(format!("IP Address {text:?} parse error during conversion from string")),
    }
}

fn network(text: &str) -> Result<IpNetwork, String> {
    let is_plain = has_prefix_length(text) && (text.ends_with("/0") || !text.contains("/0"));
    match text.parse::<IpNetwork>().ok().filter(|_| is_plain) {
        Some(IpNetwork::V6(network)) if network.ip().to_ipv4_mapped().is_some() => {
            Err(format!("IPv4-mapped IPv6 address {text:?} is not allowed"))
        }
        Some(network) => Ok(network),
        None => Err(format!("CIDR {text:?} parse error during conversion from string")),
    }
}

fn covers(outer: &IpNetwork, inner: &IpNetwork) -> bool {
    outer.is_ipv4() == inner.is_ipv4() && outer.prefix() <= inner.prefix() && outer.contains(inner.ip())
}

fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.segments()[0] & 0xffc0 == 0xfe80,
    }
}

fn is_link_local_multicast(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..3] == [224, 0, 0],
        IpAddr::V6(address) => address.segments()[0] & 0xff0f == 0xff02,
    }
}

fn is_global_unicast(address: &IpAddr) -> bool {
    let broadcast = matches!(address, IpAddr::V4(address) if address.is_broadcast());
    !(broadcast
        || address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || is_link_local(address))
}
