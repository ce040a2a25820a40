"""Tell what trials and whole trainings take: device-hours, money, energy, and what a study's gain pays back."""
