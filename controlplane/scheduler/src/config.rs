//! What the scheduler is told.

/// Settings of the scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Only pods with this `spec.schedulerName` are looked at.
    pub scheduler_name: String,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self { scheduler_name: "default-scheduler".to_owned() }
    }
}
