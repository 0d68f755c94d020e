//! Protects VolumeAttributesClasses that claims or volumes use: a class is deleted only after its last use. Source:
//! upstream's `pkg/controller/volume/vacprotection`.

pub(crate) mod plan;
pub(crate) mod run;
