//! The endpoints of the service `kubernetes`: the addresses of all servers of the cluster.
//!
//! Servers that share a store register their addresses with a time to live. Each server writes the endpoints from the
//! registered addresses, so the address of a dead server disappears. Source: `lease.go` of
//! `pkg/controlplane/reconcilers`.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use coracle_kinds::kind::by_resource;
use coracle_store::{Expect, Range, Tier, Write};
use serde_json::{Value, json};

use super::{core, ensure_kind, stored};
use crate::{
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    write::{self, Part},
};

/// Prefix of the keys of registrations. These keys contain no `/`, so no object has such a key.
const PREFIX: &str = "server-";
/// Time to live of a registration.
const TTL: Duration = Duration::from_secs(15);
/// Time between renewals.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);

/// Registers this server, and writes the endpoints.
pub(super) async fn publish(state: &Arc<State>) -> Result<()> {
    if !state.store.is_shared() {
        return write_endpoints(state, &[state.advertise]).await;
    }
    register(state, Some(TTL)).await?;
    write_registered(state).await
}

/// Renews the registration until the server stops, then removes it.
pub(super) async fn keep(state: Arc<State>) {
    loop {
        tokio::select! {
            // Cancel-safe: both futures only wait.
            () = state.shutdown.cancelled() => break,
            () = tokio::time::sleep(RENEWAL_INTERVAL) => {}
        }
        if let Err(error) = publish(&state).await {
            tracing::debug!(%error, "cannot renew the registration of this server");
        }
    }
    let removed = async {
        register(&state, None).await?;
        write_registered(&state).await
    };
    match tokio::time::timeout(RENEWAL_INTERVAL, removed).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(%error, "cannot remove the registration of this server"),
        Err(_elapsed) => tracing::warn!("removing the registration of this server timed out"),
    }
}

/// Creates or renews the registration. Without a time to live it removes the registration.
async fn register(state: &State, ttl: Option<Duration>) -> Result<()> {
    let key: Arc<str> = format!("{PREFIX}{}", state.advertise).into();
    let found = state.store.get(&key).await?;
    let expect = match &found {
        Some(entry) => Expect::Revision(entry.modified),
        None if ttl.is_none() => return Ok(()),
        None => Expect::Absent,
    };
    let value = ttl.map(|_| bytes::Bytes::new());
    let write = Write { key, expect, value, tier: Tier::Volatile { ttl }, guard: None };
    state.store.write(write).await?;
    Ok(())
}

async fn write_registered(state: &Arc<State>) -> Result<()> {
    let range = Range { prefix: PREFIX.to_owned(), ..Range::default() };
    let page = state.store.list(range).await?;
    let servers: Vec<SocketAddr> =
        page.entries.iter().filter_map(|entry| entry.key.strip_prefix(PREFIX)?.parse().ok()).collect();
    write_endpoints(state, &servers).await
}

/// Writes the Endpoints and the EndpointSlice if they differ from the registered servers. Without registered servers
/// the objects are not changed: the next server that starts writes its address.
async fn write_endpoints(state: &Arc<State>, servers: &[SocketAddr]) -> Result<()> {
    let Some((addresses, port)) = endpoints(servers) else { return Ok(()) };
    let metadata = json!({"name": "kubernetes", "namespace": "default",
        "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}});
    let ports = json!([{"name": "https", "port": port, "protocol": "TCP"}]);
    let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let object = json!({"apiVersion": "v1", "kind": "Endpoints", "metadata": metadata,
        "subsets": [{"addresses": ips, "ports": ports}]});
    replace(state, core("endpoints")?, object, &["subsets"]).await?;
    let is_v4 = servers.iter().min().is_none_or(SocketAddr::is_ipv4);
    let ready: Vec<Value> =
        addresses.iter().map(|ip| json!({"addresses": [ip], "conditions": {"ready": true}})).collect();
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default",
            "labels": {"kubernetes.io/service-name": "kubernetes"}},
        "addressType": if is_v4 { "IPv4" } else { "IPv6" },
        "endpoints": ready,
        "ports": ports,
    });
    let kind = by_resource("discovery.k8s.io", "v1", "endpointslices").ok_or_else(ApiError::no_resource)?;
    replace(state, kind, slice, &["endpoints", "ports"]).await
}

/// The addresses of the servers, and their port. A slice has one address family and one port, so servers with another
/// family or port are excluded. All servers compute the same result.
fn endpoints(servers: &[SocketAddr]) -> Option<(Vec<String>, u16)> {
    let first = servers.iter().min()?;
    let fits = |one: &&SocketAddr| one.port() == first.port() && one.is_ipv4() == first.is_ipv4();
    let mut addresses: Vec<_> = servers.iter().filter(fits).map(SocketAddr::ip).collect();
    addresses.sort_unstable();
    addresses.dedup();
    Some((addresses.iter().map(ToString::to_string).collect(), first.port()))
}

/// Creates an object, or replaces fields of the existing object.
async fn replace(
    state: &Arc<State>,
    kind: &Arc<coracle_kinds::Resource>,
    object: Value,
    fields: &[&str],
) -> Result<()> {
    let has_fields = |stored: Value| fields.iter().all(|field| stored[*field] == object[*field]);
    if stored(state, kind, &object).is_some_and(has_fields) {
        return Ok(());
    }
    ensure_kind(state, kind, object.clone()).await?;
    let call = Call::internal(state, kind.clone(), &object);
    let changed = write::update(&call, "kubernetes", Part::Main, Writer::Update, |old| {
        let mut new = old.clone();
        if let Some(new) = new.as_object_mut() {
            for field in fields {
                new.insert((*field).to_owned(), object[*field].clone());
            }
        }
        Ok(new)
    });
    changed.await.map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_agree_on_the_endpoints() {
        let of = |servers: &[&str]| {
            let servers: Vec<SocketAddr> = servers.iter().map(|one| one.parse().unwrap()).collect();
            endpoints(&servers).map(|(addresses, port)| (addresses.join(" "), port))
        };
        assert_eq!(of(&[]), None);
        let both = of(&["192.0.2.2:6443", "192.0.2.1:6443"]);
        assert_eq!(both, Some(("192.0.2.1 192.0.2.2".to_owned(), 6443)));
        let mixed = of(&["[2001:db8::1]:6443", "192.0.2.1:6444", "192.0.2.1:6443", "192.0.2.3:6443"]);
        assert_eq!(mixed, Some(("192.0.2.1 192.0.2.3".to_owned(), 6443)));
    }
}
