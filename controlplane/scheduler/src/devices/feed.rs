//! The watches of claims, classes and slices of devices.

use std::collections::HashSet;

use coracle_values::object::ObjectExt;
use futures::StreamExt;
use kube::Client;
use kube::runtime::watcher::Event;

use super::object::{Claim, Class, Slice};
use super::{Devices, State};
use crate::run::{stream, watch_config};

/// Keeps the state up to date. Never returns.
pub(crate) async fn run(client: Client, devices: Devices) {
    tokio::join!(claims(&client, &devices), classes(&client, &devices), slices(&client, &devices));
}

async fn claims(client: &Client, devices: &Devices) {
    let mut events = stream::<Claim>(client, watch_config());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        let put = |state: &mut State, claim: Claim| {
            let key = claim.key();
            if claim.status.allocation.is_some() {
                // The claim itself has the allocation now.
                state.assumed.remove(&key);
            }
            state.claims.insert(key, claim);
        };
        let mut state = devices.lock();
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(claim) => {
                listed.insert(claim.key());
                put(&mut state, claim);
            }
            Event::Apply(claim) => put(&mut state, claim),
            Event::Delete(claim) => {
                state.assumed.remove(&claim.key());
                state.claims.remove(&claim.key());
            }
            Event::InitDone => {
                state.retain_claims(&listed);
                state.listed[0] = true;
            }
        }
        drop(state);
        devices.changed();
    }
}

async fn classes(client: &Client, devices: &Devices) {
    let mut events = stream::<Class>(client, watch_config());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        let mut state = devices.lock();
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(class) => {
                listed.insert(class.name().to_owned());
                state.classes.insert(class.name().to_owned(), class);
            }
            Event::Apply(class) => drop(state.classes.insert(class.name().to_owned(), class)),
            Event::Delete(class) => drop(state.classes.remove(class.name())),
            Event::InitDone => {
                state.classes.retain(|name, _| listed.contains(name));
                state.listed[1] = true;
            }
        }
        drop(state);
        devices.changed();
    }
}

async fn slices(client: &Client, devices: &Devices) {
    let mut events = stream::<Slice>(client, watch_config());
    let mut listed = HashSet::new();
    while let Some(event) = events.next().await {
        let mut state = devices.lock();
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(slice) => {
                listed.insert(slice.name().to_owned());
                state.slices.insert(slice.name().to_owned(), slice);
            }
            Event::Apply(slice) => drop(state.slices.insert(slice.name().to_owned(), slice)),
            Event::Delete(slice) => drop(state.slices.remove(slice.name())),
            Event::InitDone => {
                state.slices.retain(|name, _| listed.contains(name));
                state.listed[2] = true;
            }
        }
        drop(state);
        devices.changed();
    }
}

impl Devices {
    fn changed(&self) {
        self.shared.changes.send_modify(|count| *count += 1);
    }
}
