//! Event subscriptions: a bit mask, in which bit n-1 stands for event n.

use coracle_proto::nri::Event;

/// The mask of all events.
pub(crate) const ALL: u32 = (1 << (Event::Last as u32 - 1)) - 1;

/// The bit of an event.
pub(crate) fn bit(event: Event) -> u32 {
    1 << (event as u32).saturating_sub(1)
}

/// The subscription in a plugin's response; 0 means all events. An unknown bit is an error.
pub(crate) fn subscription(answer: i32) -> Result<u32, i32> {
    match u32::try_from(answer) {
        Ok(0) => Ok(ALL),
        Ok(events) if events & !ALL == 0 => Ok(events),
        _ => Err(answer),
    }
}

/// The event's method name in the NRI protocol.
pub(crate) fn name(event: Event) -> &'static str {
    match event {
        Event::Unknown | Event::Last => "StateChange",
        Event::RunPodSandbox => "RunPodSandbox",
        Event::StopPodSandbox => "StopPodSandbox",
        Event::RemovePodSandbox => "RemovePodSandbox",
        Event::CreateContainer => "CreateContainer",
        Event::PostCreateContainer => "PostCreateContainer",
        Event::StartContainer => "StartContainer",
        Event::PostStartContainer => "PostStartContainer",
        Event::UpdateContainer => "UpdateContainer",
        Event::PostUpdateContainer => "PostUpdateContainer",
        Event::StopContainer => "StopContainer",
        Event::RemoveContainer => "RemoveContainer",
        Event::UpdatePodSandbox => "UpdatePodSandbox",
        Event::PostUpdatePodSandbox => "PostUpdatePodSandbox",
        Event::ValidateContainerAdjustment => "ValidateContainerAdjustment",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_is_a_mask_of_defined_events() {
        assert_eq!(bit(Event::RunPodSandbox), 1);
        assert_eq!(ALL, 0x3fff);
        assert_eq!(subscription(0), Ok(ALL));
        assert_eq!(subscription(8), Ok(bit(Event::CreateContainer)));
        assert_eq!(subscription(0x4000), Err(0x4000));
        assert_eq!(subscription(-1), Err(-1));
    }
}
