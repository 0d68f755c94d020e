//! The watches of claims, classes and slices of devices.

use std::collections::HashSet;

use coracle_values::object::ObjectExt;
use coracle_watch::{Config, Event};
use futures::StreamExt;
use kube::Client;
use serde_json::Value;

use super::object::{Claim, Class, Slice};
use super::{Devices, State};
use crate::object::{decode, is_older};
use crate::watch::stream;

/// Keeps the state up to date. It never returns.
pub(crate) async fn run(client: Client, devices: Devices) {
    tokio::join!(claims(&client, &devices), classes(&client, &devices), slices(&client, &devices));
}

async fn claims(client: &Client, devices: &Devices) {
    let mut events = stream::<Claim>(client, Config::control_plane());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        devices.apply(|state| match event {
            Event::Init => {
                listed.clear();
                state.latest_claim = None;
            }
            Event::InitApply(claim) => {
                listed.insert(claim.key());
                state.received(&claim);
                state.put_claim(claim);
            }
            Event::Apply(claim) => {
                state.received(&claim);
                state.put_changed(claim);
            }
            Event::Delete(claim) => {
                state.received(&claim);
                state.remove_claim(&claim.key());
            }
            Event::InitDone => {
                state.retain_claims(&listed);
                state.listed[0] = true;
                state.pending.supply = true;
            }
        });
    }
}

async fn classes(client: &Client, devices: &Devices) {
    let mut events = stream::<Class>(client, Config::control_plane());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        devices.apply(|state| match event {
            Event::Init => listed.clear(),
            Event::InitApply(class) => {
                listed.insert(class.name().to_owned());
                state.put_class(class);
            }
            Event::Apply(class) => state.put_class(class),
            // Do not retry pods: the deletion of a class makes no device available.
            Event::Delete(class) => state.classes.remove(class.name()),
            Event::InitDone => {
                state.classes.retain(&listed);
                state.listed[1] = true;
                state.pending.supply = true;
            }
        });
    }
}

async fn slices(client: &Client, devices: &Devices) {
    let mut events = stream::<Slice>(client, Config::control_plane());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        devices.apply(|state| match event {
            Event::Init => listed.clear(),
            Event::InitApply(slice) => {
                listed.insert(slice.name().to_owned());
                state.put_slice(slice);
            }
            Event::Apply(slice) => state.put_slice(slice),
            Event::Delete(slice) => {
                // A pool may become complete when an outdated slice is deleted.
                state.pending.supply |= state.slices.remove(slice.name());
            }
            Event::InitDone => {
                state.slices.retain(&listed);
                state.listed[2] = true;
                state.pending.supply = true;
            }
        });
    }
}

impl Devices {
    /// Adds an object of a simulated cluster. Objects of other kinds are ignored.
    pub(crate) fn add(&self, kind: &str, object: &Value) -> Result<(), serde_json::Error> {
        let mut state = self.lock();
        match kind {
            "ResourceClaim" => state.put_claim(decode(object)?),
            "DeviceClass" => state.put_class(decode(object)?),
            "ResourceSlice" => state.put_slice(decode(object)?),
            _ => {}
        }
        Ok(())
    }
}

impl State {
    /// Stores a changed claim. Ignores a state that is older than the last write. Otherwise the reserved devices of an
    /// unbound pod would count as free until the watch delivers the written state.
    pub(super) fn put_changed(&mut self, claim: Claim) {
        let known = self.claims.get(&claim.key()).filter(|known| known.metadata.uid == claim.metadata.uid);
        if known.is_none_or(|known| !is_older(&claim, known)) {
            self.put_claim(claim);
        }
    }

    pub(super) fn put_class(&mut self, class: Class) {
        let known = self.classes.get(class.name());
        self.pending.supply |= known.is_none_or(|known| known.spec != class.spec);
        self.classes.insert(class);
    }

    pub(super) fn put_slice(&mut self, slice: Slice) {
        let known = self.slices.get(slice.name());
        self.pending.supply |= known.is_none_or(|known| known.spec != slice.spec);
        self.slices.insert(slice);
    }
}
