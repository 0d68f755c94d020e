//! Merges the adjustments of several plugins for one container. Plugins are called in the order of their indices, each
//! with the container as adjusted so far. Two plugins must not set the same field. No I/O.

mod fields;
mod resources;

use std::collections::HashMap;

use coracle_proto::nri::{
    Container, ContainerAdjustment, ContainerEviction, ContainerUpdate, CreateContainerResponse, Field,
    LinuxContainerAdjustment, LinuxResources,
};

use crate::owners::{Claims, Conflict, Owners};

/// Error of a merge.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MergeError {
    /// Two plugins set the same field.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// A plugin requested an update of the container that is being created.
    #[error("plugin {plugin:?} asked to update container {id}, which is being created")]
    UpdatesNewContainer {
        /// The plugin.
        plugin: String,
        /// The container's id.
        id: String,
    },
}

/// State of the creation of a container.
#[derive(Debug, Clone, Default)]
pub struct Creation {
    /// The container with all adjustments so far.
    pub container: Container,
    /// All adjustments so far.
    pub adjustment: ContainerAdjustment,
    /// Requested updates of other containers.
    pub updates: Updates,
    /// Requested evictions.
    pub evictions: Vec<ContainerEviction>,
    /// The plugin that set each field.
    pub owners: Owners,
}

/// Updates of existing containers, one for each container.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Updates {
    /// The updates, in the order of the first request for each container.
    pub list: Vec<ContainerUpdate>,
    /// Index of each container in the list, by container id.
    places: HashMap<String, usize>,
}

/// State of the update of a container. Plugins may change the update.
#[derive(Debug, Clone, Default)]
pub struct Change {
    id: String,
    /// The resources with all changes so far.
    pub resources: LinuxResources,
    /// Whether a plugin changed the resources.
    pub changed: bool,
    /// Requested updates of other containers.
    pub updates: Updates,
    /// Requested evictions.
    pub evictions: Vec<ContainerEviction>,
    owners: Owners,
}

// === impl Creation ===

impl Creation {
    /// The state before the first plugin is called.
    #[must_use]
    pub fn new(container: Container) -> Self {
        Self { container, ..Self::default() }
    }

    /// Merges the response of one plugin.
    ///
    /// # Errors
    /// If the response conflicts with the response of an earlier plugin.
    pub fn merge(&mut self, plugin: &str, answer: CreateContainerResponse) -> Result<(), MergeError> {
        if let Some(adjustment) = answer.adjust {
            self.adjust(plugin, adjustment)?;
        }
        for update in answer.update {
            if update.container_id == self.container.id {
                let id = update.container_id;
                return Err(MergeError::UpdatesNewContainer { plugin: plugin.to_owned(), id });
            }
            self.updates.merge(plugin, &update, &mut self.owners)?;
        }
        self.evictions.extend(answer.evict);
        Ok(())
    }

    fn adjust(&mut self, plugin: &str, requested: ContainerAdjustment) -> Result<(), Conflict> {
        let id = self.container.id.clone();
        let mut claims = self.owners.claims(&id, plugin);
        let (adjusted, all) = (&mut self.container, &mut self.adjustment);
        fields::annotations(&requested.annotations, &mut claims, adjusted, all)?;
        fields::mounts(requested.mounts, &mut claims, adjusted, all)?;
        fields::env(requested.env, &mut claims, adjusted, all)?;
        fields::args(requested.args, &mut claims, adjusted, all)?;
        if let Some(hooks) = requested.hooks {
            fields::hooks(&hooks, &mut claims, adjusted, all);
        }
        if let Some(linux) = requested.linux {
            adjust_linux(linux, &mut claims, adjusted, all)?;
        }
        for limit in requested.rlimits {
            claims.set_entry(Field::Rlimits, &limit.r#type)?;
            adjusted.rlimits.push(limit.clone());
            all.rlimits.push(limit);
        }
        for device in requested.cdi_devices {
            claims.set_entry(Field::CdiDevices, &device.name)?;
            all.cdi_devices.push(device);
        }
        Ok(())
    }
}

fn adjust_linux(
    requested: LinuxContainerAdjustment,
    claims: &mut Claims<'_>,
    adjusted: &mut Container,
    all: &mut ContainerAdjustment,
) -> Result<(), Conflict> {
    let adjusted = adjusted.linux.get_or_insert_default();
    let all = all.linux.get_or_insert_default();
    fields::devices(requested.devices, claims, adjusted, all)?;
    if let Some(resources) = &requested.resources {
        let mut targets = [adjusted.resources.get_or_insert_default(), all.resources.get_or_insert_default()];
        resources::merge(resources, claims, &mut targets)?;
        for target in targets {
            target.devices.extend(resources.devices.iter().cloned());
        }
    }
    if !requested.cgroups_path.is_empty() {
        claims.set(Field::CgroupsPath)?;
        adjusted.cgroups_path.clone_from(&requested.cgroups_path);
        all.cgroups_path = requested.cgroups_path;
    }
    fields::namespaces(requested.namespaces, claims, adjusted, all)?;
    fields::sysctls(&requested.sysctl, claims, adjusted, all)?;
    fields::net_devices(requested.net_devices, claims, adjusted, all)?;
    if let Some(rdt) = requested.rdt {
        fields::rdt(rdt, claims, all)?;
    }
    macro_rules! one_value {
        ($($name:ident is $field:ident),* $(,)?) => {$(
            if let Some(value) = requested.$name {
                claims.set(Field::$field)?;
                adjusted.$name = Some(value.clone());
                all.$name = Some(value);
            }
        )*};
    }
    one_value!(
        oom_score_adj is OomScoreAdj,
        io_priority is IoPriority,
        seccomp_policy is SeccompPolicy,
        scheduler is LinuxSched,
    );
    if let Some(policy) = requested.memory_policy {
        claims.set(Field::MemoryPolicy)?;
        all.memory_policy = Some(policy);
    }
    Ok(())
}

// === impl Updates ===

impl Updates {
    /// Merges one plugin's update of one container. An update with `ignore_failure` that conflicts with an earlier
    /// update is skipped as a whole.
    ///
    /// # Errors
    /// If the update conflicts with an earlier update, and `ignore_failure` is not set.
    pub fn merge(
        &mut self,
        plugin: &str,
        update: &ContainerUpdate,
        owners: &mut Owners,
    ) -> Result<(), Conflict> {
        let id = &update.container_id;
        let requested = requested_of(update);
        match requested.map_or(Ok(()), |requested| claim(requested, owners.claims(id, plugin))) {
            Ok(()) => {}
            Err(_conflict) if update.ignore_failure => return Ok(()),
            Err(conflict) => return Err(conflict),
        }
        let at = *self.places.entry(id.clone()).or_insert_with(|| {
            let ignore_failure = update.ignore_failure;
            self.list.push(ContainerUpdate { container_id: id.clone(), linux: None, ignore_failure });
            self.list.len() - 1
        });
        let merged = &mut self.list[at];
        merged.ignore_failure &= update.ignore_failure;
        if let Some(requested) = requested {
            apply(requested, merged.linux.get_or_insert_default().resources.get_or_insert_default())?;
        }
        Ok(())
    }
}

fn requested_of(update: &ContainerUpdate) -> Option<&LinuxResources> {
    update.linux.as_ref()?.resources.as_ref()
}

/// Claims all requested fields, or none of them.
fn claim(requested: &LinuxResources, mut claims: Claims<'_>) -> Result<(), Conflict> {
    let claimed = resources::merge(requested, &mut claims, &mut []);
    if claimed.is_err() {
        claims.undo();
    }
    claimed
}

/// Sets the requested fields. The plugin has already claimed them.
fn apply(requested: &LinuxResources, target: &mut LinuxResources) -> Result<(), Conflict> {
    resources::merge(requested, &mut Owners::default().claims("", ""), &mut [target])
}

// === impl Change ===

impl Change {
    /// The state before the first plugin is called.
    #[must_use]
    pub fn new(id: &str, resources: LinuxResources) -> Self {
        Self { id: id.to_owned(), resources, ..Self::default() }
    }

    /// Merges the response of one plugin.
    ///
    /// # Errors
    /// If the response conflicts with the response of an earlier plugin.
    pub fn merge(&mut self, plugin: &str, updates: &[ContainerUpdate]) -> Result<(), Conflict> {
        for update in updates {
            if update.container_id == self.id {
                self.merge_own(plugin, update)?;
            } else {
                self.updates.merge(plugin, update, &mut self.owners)?;
            }
        }
        Ok(())
    }

    fn merge_own(&mut self, plugin: &str, update: &ContainerUpdate) -> Result<(), Conflict> {
        let Some(requested) = requested_of(update) else { return Ok(()) };
        match claim(requested, self.owners.claims(&self.id, plugin)) {
            Ok(()) => {
                self.changed = true;
                apply(requested, &mut self.resources)
            }
            Err(_conflict) if update.ignore_failure => Ok(()),
            Err(conflict) => Err(conflict),
        }
    }
}

#[cfg(test)]
mod tests;
