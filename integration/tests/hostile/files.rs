//! Local users of the machine, and files whose size or type a container or image chooses.
