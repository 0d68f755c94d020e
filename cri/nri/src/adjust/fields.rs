//! Merges fields with several entries. Each function merges one plugin's entries into the adjustment of all
//! plugins (`all`) and into the container for the next plugin (`adjusted`).

use std::collections::{BTreeMap, HashMap, HashSet};

use coracle_proto::nri::{
    Container, ContainerAdjustment, Field, Hooks, KeyValue, LinuxContainer, LinuxContainerAdjustment,
    LinuxDevice, LinuxNamespace, LinuxNetDevice, LinuxRdt, Mount,
};

use crate::mark::{mark, unmark, variable};
use crate::owners::{Claims, Conflict};

/// A field, and the claims of the plugin that changes it.
struct FieldClaims<'a, 'b> {
    field: Field,
    claims: &'a mut Claims<'b>,
}

/// Splits a plugin's map into the entries to set and the names to remove.
fn split<T>(requested: &BTreeMap<String, T>) -> (Vec<(&str, &T)>, HashSet<&str>) {
    let (mut set, mut removed) = (Vec::new(), HashSet::new());
    for (name, value) in requested {
        match unmark(name) {
            (name, true) => drop(removed.insert(name)),
            (name, false) => set.push((name, value)),
        }
    }
    (set, removed)
}

/// Merges entries of a map. A plugin that removes an entry may set it again.
fn map<T: Clone + Default>(
    requested: &BTreeMap<String, T>,
    target: FieldClaims<'_, '_>,
    adjusted: &mut BTreeMap<String, T>,
    all: &mut BTreeMap<String, T>,
) -> Result<(), Conflict> {
    let FieldClaims { field, claims } = target;
    let (set, removed) = split(requested);
    for name in &removed {
        claims.clear_entry(field, name);
        adjusted.remove(*name);
        all.remove(*name);
        all.insert(mark(name), T::default());
    }
    for (name, value) in set {
        claims.set_entry(field, name)?;
        adjusted.insert(name.to_owned(), value.clone());
        all.insert(name.to_owned(), value.clone());
    }
    Ok(())
}

pub(super) fn annotations(
    requested: &BTreeMap<String, String>,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    map(
        requested,
        FieldClaims { field: Field::Annotations, claims },
        &mut adjusted.annotations,
        &mut all.annotations,
    )
}

pub(super) fn sysctls(
    requested: &BTreeMap<String, String>,
    claims: &mut Claims<'_>,
    adjusted: &mut LinuxContainer,
    all: &mut LinuxContainerAdjustment,
) -> Result<(), Conflict> {
    map(requested, FieldClaims { field: Field::Sysctl, claims }, &mut adjusted.sysctl, &mut all.sysctl)
}

pub(super) fn net_devices(
    requested: BTreeMap<String, LinuxNetDevice>,
    claims: &mut Claims<'_>,
    adjusted: &mut LinuxContainer,
    all: &mut LinuxContainerAdjustment,
) -> Result<(), Conflict> {
    map(
        &requested,
        FieldClaims { field: Field::LinuxNetDevices, claims },
        &mut adjusted.net_devices,
        &mut all.net_devices,
    )
}

/// Merges entries of a list, which are identified by a name.
fn list<T: Clone>(
    requested: Vec<T>,
    name: impl Fn(&T) -> &str,
    target: FieldClaims<'_, '_>,
    adjusted: &mut Vec<T>,
    all: &mut Vec<T>,
) -> Result<(), Conflict> {
    let FieldClaims { field, claims } = target;
    let (removals, set): (Vec<T>, Vec<T>) = requested.into_iter().partition(|item| unmark(name(item)).1);
    let removed: HashSet<&str> = removals.iter().map(|item| unmark(name(item)).0).collect();
    let changed: HashSet<&str> = set.iter().map(&name).collect();
    for bare in &removed {
        claims.clear_entry(field, bare);
    }
    all.retain(|item| !removed.contains(unmark(name(item)).0));
    adjusted.retain(|item| !removed.contains(name(item)) && !changed.contains(name(item)));
    for item in &set {
        claims.set_entry(field, name(item))?;
    }
    // A removal stays in the list before the new entry, because the container itself may have the old entry.
    all.extend(removals);
    all.extend(set.iter().cloned());
    adjusted.extend(set);
    Ok(())
}

pub(super) fn mounts(
    requested: Vec<Mount>,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    list(
        requested,
        |mount| &mount.destination,
        FieldClaims { field: Field::Mounts, claims },
        &mut adjusted.mounts,
        &mut all.mounts,
    )
}

pub(super) fn devices(
    requested: Vec<LinuxDevice>,
    claims: &mut Claims<'_>,
    adjusted: &mut LinuxContainer,
    all: &mut LinuxContainerAdjustment,
) -> Result<(), Conflict> {
    list(
        requested,
        |device| &device.path,
        FieldClaims { field: Field::Devices, claims },
        &mut adjusted.devices,
        &mut all.devices,
    )
}

pub(super) fn env(
    requested: Vec<KeyValue>,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    let names: HashSet<String> = requested.iter().map(|entry| unmark(&entry.key).0.to_owned()).collect();
    adjusted.env.retain(|entry| !names.contains(variable(entry)));
    let set = requested.iter().filter(|entry| !unmark(&entry.key).1);
    adjusted.env.extend(set.map(|entry| format!("{}={}", entry.key, entry.value)));
    list(
        requested,
        |entry| &entry.key,
        FieldClaims { field: Field::Env, claims },
        &mut Vec::new(),
        &mut all.env,
    )
}

/// Merges the arguments as a whole. With an empty first argument, a plugin replaces the arguments of earlier plugins.
pub(super) fn args(
    mut requested: Vec<String>,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    if requested.is_empty() {
        return Ok(());
    }
    if requested[0].is_empty() {
        claims.clear(Field::Args);
        requested.remove(0);
    }
    claims.set(Field::Args)?;
    adjusted.args.clone_from(&requested);
    all.args = requested;
    Ok(())
}

/// Merges hooks. They accumulate, so plugins never conflict.
pub(super) fn hooks(
    requested: &Hooks,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) {
    if *requested == Hooks::default() {
        return;
    }
    claims.join(Field::OciHooks);
    for target in [adjusted.hooks.get_or_insert_default(), all.hooks.get_or_insert_default()] {
        target.prestart.extend(requested.prestart.iter().cloned());
        target.create_runtime.extend(requested.create_runtime.iter().cloned());
        target.create_container.extend(requested.create_container.iter().cloned());
        target.start_container.extend(requested.start_container.iter().cloned());
        target.poststart.extend(requested.poststart.iter().cloned());
        target.poststop.extend(requested.poststop.iter().cloned());
    }
}

/// Merges namespaces by type. A removal claims the type too, so that no later plugin adds a namespace of this type
/// again.
pub(super) fn namespaces(
    requested: Vec<LinuxNamespace>,
    claims: &mut Claims<'_>,
    adjusted: &mut LinuxContainer,
    all: &mut LinuxContainerAdjustment,
) -> Result<(), Conflict> {
    let mut types: HashMap<String, usize> = HashMap::new();
    for (at, namespace) in requested.iter().enumerate() {
        let (bare, _removed) = unmark(&namespace.r#type);
        claims.set_entry(Field::Namespace, bare)?;
        types.insert(bare.to_owned(), at);
    }
    adjusted.namespaces.retain(|namespace| !types.contains_key(&namespace.r#type));
    adjusted.namespaces.extend(requested.iter().filter(|namespace| !unmark(&namespace.r#type).1).cloned());
    all.namespaces.extend(requested);
    Ok(())
}

pub(super) fn rdt(
    requested: LinuxRdt,
    claims: &mut Claims<'_>,
    all: &mut LinuxContainerAdjustment,
) -> Result<(), Conflict> {
    let all = all.rdt.get_or_insert_default();
    if requested.remove {
        for field in [Field::RdtClosId, Field::RdtSchemata, Field::RdtEnableMonitoring] {
            claims.clear(field);
        }
        *all = LinuxRdt { remove: true, ..Default::default() };
    }
    macro_rules! one_value {
        ($($name:ident is $field:ident),*) => {$(
            if let Some(value) = requested.$name {
                claims.set(Field::$field)?;
                all.$name = Some(value);
                all.remove = false;
            }
        )*};
    }
    one_value!(clos_id is RdtClosId, schemata is RdtSchemata, enable_monitoring is RdtEnableMonitoring);
    Ok(())
}
