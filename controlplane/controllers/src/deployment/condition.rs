//! The conditions of a deployment's status.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::DeploymentCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

pub(crate) const AVAILABLE: &str = "Available";
pub(crate) const PROGRESSING: &str = "Progressing";
pub(crate) const REPLICA_FAILURE: &str = "ReplicaFailure";

/// The conditions of a status under construction.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conditions(pub(crate) Vec<DeploymentCondition>);

impl Conditions {
    /// The condition of this type.
    pub(crate) fn get(&self, type_: &str) -> Option<&DeploymentCondition> {
        self.0.iter().find(|condition| condition.type_.as_deref() == Some(type_))
    }

    /// The reason of the condition of this type.
    pub(crate) fn reason(&self, type_: &str) -> Option<&str> {
        self.get(type_).and_then(|condition| condition.reason.as_deref())
    }

    /// Sets a condition. If status and reason are the same, nothing changes. If only the status is the same, the
    /// transition time is kept.
    pub(crate) fn set(&mut self, new: DeploymentCondition) {
        let type_ = new.type_.clone().unwrap_or_default();
        let Some(old) = self.get(&type_) else { return self.0.push(new) };
        if old.status != new.status || old.reason != new.reason {
            self.replace(new);
        }
    }

    /// Sets a condition even if only its times or message differ.
    pub(crate) fn replace(&mut self, mut new: DeploymentCondition) {
        let type_ = new.type_.clone().unwrap_or_default();
        if let Some(old) = self.get(&type_)
            && old.status == new.status
        {
            new.last_transition_time = old.last_transition_time.clone();
        }
        self.remove(&type_);
        self.0.push(new);
    }

    /// Removes the condition of this type.
    pub(crate) fn remove(&mut self, type_: &str) {
        self.0.retain(|condition| condition.type_.as_deref() != Some(type_));
    }
}

/// A condition whose times are the current time.
pub(crate) fn condition(
    type_: &str,
    status: &str,
    reason: &str,
    message: String,
    now: Timestamp,
) -> DeploymentCondition {
    let time = Timestamp::from_second(now.as_second()).unwrap_or(now);
    DeploymentCondition {
        type_: Some(type_.to_owned()),
        status: Some(status.to_owned()),
        reason: Some(reason.to_owned()),
        message: Some(message),
        last_transition_time: Some(Time(time)),
        last_update_time: Some(Time(time)),
    }
}
