//! Decides the addresses of a LoadBalancer service and the node that announces them. No I/O.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde_json::{Value, json};

use super::claims::Claims;
use super::service;
use crate::object::{ObjectExt, Service};

/// Condition of a service. Its message is the name of the node that announces the addresses.
const ANNOUNCED: &str = "coracle.dev/Announced";
const CHOSEN: &str = "NodeChosen";

/// The node that announces the addresses according to the service's status.
fn announcer(service: &Service) -> Option<&str> {
    let mut all = service.status.conditions.iter().flatten();
    let chosen = all.find(|one| one.type_ == ANNOUNCED && one.reason == CHOSEN)?;
    Some(&chosen.message)
}

/// Chooses an address for each family of the pool. A service keeps its addresses. The error is the reason of a refusal.
pub(crate) fn choose_addresses(
    service: &Service,
    pool: &[IpNetwork],
    claims: &Claims,
) -> Result<BTreeSet<IpAddr>, String> {
    let key = service.key();
    let is_free = |address| claims.is_free(address, &key);
    if pool.is_empty() {
        return Err("this cluster has no address pool; set --load-balancer-pool".to_owned());
    }
    let requested = service.spec.load_balancer_ip.as_deref().filter(|ip| !ip.is_empty());
    let requested: Option<IpAddr> = match requested.map(str::parse) {
        Some(Err(_)) => return Err("loadBalancerIP is not an IP address".to_owned()),
        Some(Ok(address)) => Some(address),
        None => None,
    };
    let is_in_pool = |address: IpAddr| pool.iter().any(|range| range.contains(address));
    if let Some(address) = requested.filter(|address| !is_in_pool(*address)) {
        return Err(format!("loadBalancerIP {address} is not in the address pool"));
    }
    let mut all = BTreeSet::new();
    for family in service.spec.ip_families.iter().flatten() {
        let of_family = |address: &IpAddr| address.is_ipv4() == (family == "IPv4");
        let mut ranges = pool.iter().filter(|range| of_family(&range.ip())).peekable();
        if ranges.peek().is_none() {
            continue;
        }
        if let Some(address) = requested.filter(of_family) {
            if !is_free(address) {
                return Err(format!("loadBalancerIP {address} belongs to another service or a node"));
            }
            all.insert(address);
            continue;
        }
        // A recently chosen address may not be in the status yet.
        let mut kept = service::addresses(service).chain(claims.held(&key)).filter(of_family);
        let kept = kept.find(|address| is_in_pool(*address) && is_free(*address));
        let found = kept.or_else(|| ranges.find_map(|range| claims.first_free(range)));
        all.insert(found.ok_or_else(|| format!("the {family} ranges of the address pool are exhausted"))?);
    }
    if all.is_empty() {
        return Err("the address pool has no range of the service's families".to_owned());
    }
    if requested.is_some_and(|requested| !all.contains(&requested)) {
        return Err("loadBalancerIP has a family that the service does not have".to_owned());
    }
    Ok(all)
}

/// Chooses the node that announces the addresses. The current node is kept while it is eligible. Otherwise rendezvous
/// hashing of address and node decides, so that the loss of a node moves only the services that this node announced.
pub(crate) fn choose_node<'a>(
    service: &Service,
    addresses: &BTreeSet<IpAddr>,
    candidates: &'a BTreeSet<String>,
) -> Option<&'a str> {
    let current = announcer(service).and_then(|name| candidates.get(name));
    let weight = |name: &&String| {
        let mut hasher = DefaultHasher::new();
        (addresses.first(), name).hash(&mut hasher);
        hasher.finish()
    };
    current.or_else(|| candidates.iter().max_by_key(weight)).map(String::as_str)
}

/// The status patch with the addresses and the condition. `None` if the status already has both.
pub(crate) fn status(
    service: &Service,
    addresses: &BTreeSet<IpAddr>,
    node: Option<&str>,
    now: jiff::Timestamp,
) -> Option<Value> {
    let (status, reason, message) = match node {
        Some(name) => ("True", CHOSEN, name),
        None if addresses.is_empty() => ("False", "NoAddress", "the service has no address of the pool"),
        None => ("False", "NoNode", "no ready node can announce the addresses"),
    };
    let old = service.status.conditions.iter().flatten().find(|one| one.type_ == ANNOUNCED);
    let is_same =
        old.is_some_and(|old| old.status == status && old.reason == reason && old.message == message);
    if is_same && service::addresses(service).collect::<BTreeSet<_>>() == *addresses {
        return None;
    }
    let since = old.filter(|old| old.status == status).map_or(now, |old| old.last_transition_time.0);
    let since = since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let own = json!({"type": ANNOUNCED, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": since});
    let others = service.status.conditions.iter().flatten().filter(|one| one.type_ != ANNOUNCED);
    let conditions: Vec<Value> = others.map(|one| json!(one)).chain([own]).collect();
    let ingress: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip, "ipMode": "VIP"})).collect();
    let ingress = if ingress.is_empty() { Value::Null } else { ingress.into() };
    Some(json!({"loadBalancer": {"ingress": ingress}, "conditions": conditions}))
}

/// The status patch for a service that has left the pool: it removes addresses and condition. `None` if the service has
/// no condition of the pool: its addresses belong to another controller.
pub(crate) fn cleared(service: &Service) -> Option<Value> {
    service.status.conditions.iter().flatten().find(|one| one.type_ == ANNOUNCED)?;
    let others = service.status.conditions.iter().flatten().filter(|one| one.type_ != ANNOUNCED);
    let conditions: Vec<Value> = others.map(|one| json!(one)).collect();
    Some(json!({"loadBalancer": {"ingress": null}, "conditions": conditions}))
}

#[cfg(test)]
mod tests {
    use super::super::service::CLASS;
    use super::*;
    use crate::object::Key;

    fn service(spec: Value, status: Value) -> Service {
        let mut value = json!({"metadata": {"namespace": "n", "name": "s"}, "spec": spec, "status": status});
        value["spec"]["type"] = "LoadBalancer".into();
        value["spec"]["loadBalancerClass"] = CLASS.into();
        if value["spec"]["ipFamilies"].is_null() {
            value["spec"]["ipFamilies"] = json!(["IPv4"]);
        }
        serde_json::from_value(value).unwrap()
    }

    fn chosen(spec: Value, status: Value, taken: &[&str]) -> Result<Vec<String>, String> {
        let pool: Vec<IpNetwork> = ["192.0.2.8/30", "fd99::/126"].map(|range| range.parse().unwrap()).into();
        let mut claims = Claims::default();
        claims.set(&Key::new("n", "other"), &taken.iter().map(|ip| ip.parse().unwrap()).collect());
        let all = choose_addresses(&service(spec, status), &pool, &claims)?;
        Ok(all.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn an_address_of_each_family_is_chosen_and_kept() {
        assert_eq!(chosen(json!({}), json!({}), &["192.0.2.8"]).unwrap(), ["192.0.2.9"]);
        let both = json!({"ipFamilies": ["IPv6", "IPv4"]});
        assert_eq!(chosen(both, json!({}), &[]).unwrap(), ["192.0.2.8", "fd99::"]);
        let has = |ip: &str| json!({"loadBalancer": {"ingress": [{"ip": ip}]}});
        assert_eq!(chosen(json!({}), has("192.0.2.10"), &[]).unwrap(), ["192.0.2.10"]);
        assert_eq!(chosen(json!({}), has("192.0.2.10"), &["192.0.2.10"]).unwrap(), ["192.0.2.8"]);
        assert_eq!(chosen(json!({}), has("203.0.113.1"), &[]).unwrap(), ["192.0.2.8"], "outside the pool");
        let all = ["192.0.2.8", "192.0.2.9", "192.0.2.10", "192.0.2.11"];
        assert!(chosen(json!({}), json!({}), &all).unwrap_err().contains("exhausted"));
    }

    #[test]
    fn a_tenant_gets_only_free_addresses_of_the_pool() {
        let ask = |ip: &str| json!({"loadBalancerIP": ip});
        assert_eq!(chosen(ask("192.0.2.11"), json!({}), &[]).unwrap(), ["192.0.2.11"]);
        for (ip, taken, why) in [
            ("192.0.2.11", &["192.0.2.11"][..], "belongs to another service or a node"),
            ("10.0.0.1", &[], "not in the address pool"),
            ("x", &[], "not an IP address"),
            ("fd99::1", &[], "a family that the service does not have"),
        ] {
            let said = chosen(ask(ip), json!({}), taken).unwrap_err();
            assert!(said.contains(why), "{ip}: {said}");
        }
        assert!(choose_addresses(&service(json!({}), json!({})), &[], &Claims::default()).is_err());
    }

    #[test]
    fn a_service_keeps_the_address_that_it_holds_before_its_status_has_it() {
        let (mut claims, service) = (Claims::default(), service(json!({}), json!({})));
        let pool: Vec<IpNetwork> = vec!["192.0.2.8/31".parse().unwrap()];
        let held = BTreeSet::from(["192.0.2.9".parse().unwrap()]);
        claims.set(&service.key(), &held);
        assert_eq!(choose_addresses(&service, &pool, &claims).unwrap(), held);
        claims.set_node(&[], &["192.0.2.8".parse().unwrap()]);
        assert_eq!(choose_addresses(&service, &pool, &claims).unwrap(), held);
        claims.set_node(&[], &["192.0.2.9".parse().unwrap()]);
        assert!(choose_addresses(&service, &pool, &claims).unwrap_err().contains("exhausted"));
    }

    #[test]
    fn a_node_announces_the_addresses_until_the_node_is_lost() {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let (mut service, ips) =
            (service(json!({}), json!({})), BTreeSet::from(["192.0.2.8".parse().unwrap()]));
        let nodes = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let all = nodes(&["a", "b", "c"]);
        let first = choose_node(&service, &ips, &all).unwrap().to_owned();
        service.status = serde_json::from_value(status(&service, &ips, Some(&first), now).unwrap()).unwrap();
        assert_eq!(announcer(&service), Some(first.as_str()));
        assert_eq!(status(&service, &ips, Some(&first), now), None, "nothing changed");
        assert_eq!(choose_node(&service, &ips, &all), Some(first.as_str()));
        let rest: BTreeSet<String> = all.iter().filter(|name| **name != first).cloned().collect();
        let next = choose_node(&service, &ips, &rest).unwrap();
        assert_ne!(next, first);
        assert!(status(&service, &ips, Some(next), now).is_some());
        assert_eq!(choose_node(&service, &ips, &nodes(&[])), None);
        let lost = status(&service, &ips, None, now).unwrap();
        assert_eq!(
            (&lost["conditions"][0]["status"], &lost["loadBalancer"]["ingress"][0]["ip"]),
            (&json!("False"), &json!("192.0.2.8"))
        );
        assert!(cleared(&service).unwrap()["loadBalancer"]["ingress"].is_null());
        service.status = serde_json::from_value(lost).unwrap();
        let left = json!({"loadBalancer": {"ingress": null}, "conditions": []});
        assert_eq!(cleared(&service), Some(left.clone()), "no node announced the addresses");
        service.status = serde_json::from_value(left).unwrap();
        assert_eq!(cleared(&service), None);
    }
}
