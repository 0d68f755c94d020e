//! Changes the MTU of running pods to the MTU of the default network.

use std::path::Path;
use std::sync::Arc;

use rtnetlink::LinkUnspec;
use serde_json::{Value, json};

use super::Network;
use super::default::NAME;
use crate::attachment_cache::Entry;
use crate::error::Error;
use crate::link::Links;
use crate::link::derived::host_interface;
use crate::netns::{self, Netns};

/// A change of the default network's MTU.
#[derive(Clone, Copy)]
struct MtuChange {
    /// The MTU at the creation of the attachment.
    from: u32,
    to: u32,
}

impl Network {
    /// Sets this MTU at both ends of the veth pair of each running pod of the default network. If the MTU of an end is
    /// smaller than at its creation, an administrator or the pod has set it. Such an MTU is kept unless it is too
    /// large.
    pub(super) async fn resize_pods(&self, mtu: u32) -> Result<(), Error> {
        let inner = &self.inner;
        let mut first = Ok(());
        for mut entry in inner.cache.all() {
            let Some(initial) = initial_mtu(&entry, &inner.config.bridge).filter(|initial| *initial != mtu)
            else {
                continue;
            };
            // The new MTU is recorded last, so that an incomplete change is repeated.
            first = first.and(match self.resize(&entry, MtuChange { from: initial, to: mtu }).await {
                Ok(()) => {
                    set_recorded_mtu(&mut entry, mtu);
                    inner.cache.put(entry)
                }
                Err(error) => Err(error),
            });
        }
        first
    }

    async fn resize(&self, entry: &Entry, change: MtuChange) -> Result<(), Error> {
        let (at, links) = (&entry.at, &self.inner.host.links);
        set(links, &host_interface(&at.container_id, &at.ifname), change).await?;
        match at.netns.as_deref().filter(|path| leads_to_namespace(entry, path)) {
            Some(path) => set(&Links::inside(&Netns::open(path)?)?, &at.ifname, change).await,
            None => Ok(()),
        }
    }
}

/// Whether the path still leads to the entry's namespace.
fn leads_to_namespace(entry: &Entry, path: &Path) -> bool {
    entry.netns_id.is_some() && netns::id(path) == entry.netns_id
}

async fn set(links: &Links, name: &str, change: MtuChange) -> Result<(), Error> {
    match links.find(name).await? {
        Some(link) if link.mtu == change.from || link.mtu > change.to => {
            links.change(LinkUnspec::new_with_index(link.index).mtu(change.to), "set the MTU of", name).await
        }
        _ => Ok(()),
    }
}

/// The MTU at the creation of the attachment. `None` if the attachment is not of the default network.
fn initial_mtu(entry: &Entry, bridge: &str) -> Option<u32> {
    let plugin = entry.list.plugins.first()?;
    let ours = entry.list.name == NAME && plugin.get("bridge").and_then(Value::as_str) == Some(bridge);
    u32::try_from(plugin.get("mtu").filter(|_| ours)?.as_u64()?).ok()
}

/// Changes the MTU in the record.
fn set_recorded_mtu(entry: &mut Entry, mtu: u32) {
    if let Some(plugin) = Arc::make_mut(&mut entry.list).plugins.first_mut() {
        plugin.insert("mtu".to_owned(), json!(mtu));
    }
    let interfaces = entry.result.iter_mut().flat_map(|result| &mut result.interfaces);
    interfaces.filter(|interface| interface.mtu.is_some()).for_each(|interface| interface.mtu = Some(mtu));
}
