//! Conditions of an autoscaler.

use jiff::Timestamp;
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscalerCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// The conditions of one autoscaler.
#[derive(Clone, Debug)]
pub(super) struct Conditions {
    pub(super) list: Vec<HorizontalPodAutoscalerCondition>,
    now: Timestamp,
}

impl Conditions {
    pub(super) fn new(list: Option<&Vec<HorizontalPodAutoscalerCondition>>, now: Timestamp) -> Self {
        let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
        Self { list: list.cloned().unwrap_or_default(), now }
    }

    /// Sets one condition. The transition time changes only with the status.
    pub(super) fn set(&mut self, type_: &str, status: bool, reason: &str, message: &str) {
        let place = self.list.iter().position(|known| known.type_ == type_).unwrap_or_else(|| {
            self.list
                .push(HorizontalPodAutoscalerCondition { type_: type_.to_owned(), ..Default::default() });
            self.list.len() - 1
        });
        let Some(condition) = self.list.get_mut(place) else { return };
        let status = if status { "True" } else { "False" };
        if condition.status != status {
            condition.last_transition_time = Some(Time(self.now));
        }
        status.clone_into(&mut condition.status);
        condition.reason = Some(reason.to_owned());
        condition.message = Some(message.to_owned());
    }
}
