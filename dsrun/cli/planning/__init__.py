"""The parts of `dsrun plan`: tables and sentences, pictures, measuring, calibrating."""
